"""Launches of batch norm in Triton: how a tensor is cut into blocks, and that no cut and no timing changes results."""

from functools import partial

import pytest
import torch

from lowtide.kernels.activations import Activation
from lowtide.kernels.reference.batchnorm import Affine, Running

triton = pytest.importorskip("triton")
from lowtide.kernels.triton import batchnorm as kernels  # noqa: E402
from tests.kernels.test_batchnorm_programs import make  # noqa: E402


@pytest.mark.parametrize("name", ["NCHW", "NHWC", "rows"])
def test_parts_and_whole_tiles_agree(name, monkeypatch):
    x, dz, weight, bias = make(name)
    act = Activation.of("leaky_relu")
    z, mean, invstd, _ = kernels.forward(x, weight, bias, Running(), act, eps=1e-5)
    affine = Affine(mean, invstd, weight, bias)
    whole = kernels.backward(dz, z, "z", affine, act, training=True)
    monkeypatch.setattr(kernels, "grid_of", partial(kernels.grid_of, streams=8))
    for actual, expected in zip(kernels.measure(x, Running(), eps=1e-5), (mean, invstd), strict=True):
        torch.testing.assert_close(actual, expected)
    assert torch.equal(kernels.normalize(x, "x", affine, act)[0], z)
    parts = kernels.backward(dz, z, "z", affine, act, training=True)
    for actual, expected in zip(parts[:3], whole[:3], strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)  # sums in another order


@pytest.mark.parametrize("name", ["NCHW", "NHWC"])
def test_tensors_in_any_layout_give_the_same_bits(name):
    x, dz, weight, bias = make(name)
    act, residual = Activation.of("silu"), torch.randn_like(x)

    def step(x, dz, residual):
        z, mean, invstd, _ = kernels.forward(x, weight, bias, Running(), act, None, residual, eps=1e-5)
        affine = Affine(mean, invstd, weight, bias)
        assert torch.equal(kernels.normalize(x, "x", affine, act, None, residual)[0], z)
        return z, *kernels.backward(dz, x, "x", affine, act, None, residual, training=True)[:3]

    def apart(t):
        return torch.stack([t, t], dim=-1)[..., 0]

    other = torch.contiguous_format if name == "NHWC" else torch.channels_last
    expected = step(x.contiguous(), dz.contiguous(), residual.contiguous())
    actual = step(apart(x), dz.contiguous(memory_format=other), apart(residual))
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.gpu
def test_results_are_the_same_every_time():
    x, dz, weight, bias = make("many parts")
    act = Activation.of("leaky_relu")

    def step():
        z, mean, invstd, _ = kernels.forward(x, weight, bias, Running(), act, eps=1e-5)
        return z, *kernels.backward(dz, z, "z", Affine(mean, invstd, weight, bias), act, training=True)[:3]

    first = step()
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(step(), first, strict=True))


@pytest.mark.gpu
def test_two_streams_do_not_disturb_each_other():
    x, _, weight, bias = make("many parts")
    act = Activation.of("leaky_relu")
    expected = kernels.forward(x, weight, bias, Running(), act, eps=1e-5)[0]
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    actual = []
    for _ in range(10):
        for stream in streams:
            with torch.cuda.stream(stream):
                actual.append(kernels.forward(x, weight, bias, Running(), act, eps=1e-5)[0])
    torch.cuda.synchronize()
    assert all(torch.equal(z, expected) for z in actual)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("nhwc", [False, True])
def test_blocks_are_powers_of_two_whatever_the_channels(dtype, nhwc):
    for channels in (*range(1, 200), 256, 257, 320, 384, 448, 512, 1000, 2048):
        for rows in (3, 49, 784, 12544):
            grid = kernels.grid_of(torch.Size((64, channels, rows)), nhwc, dtype, torch.device("cpu"), 264)
            blocks = (*grid.sums.constants[-2:], *grid.map.constants[-2:], grid.at_once)
            assert all(block & (block - 1) == 0 for block in blocks), (channels, rows, blocks)
            assert grid.parts <= grid.sums.blocks
