"""Programs of batch norm against float64: in Triton's interpreter on a CPU, compiled on a GPU."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F

from lowtide.kernels.activations import Activation
from lowtide.kernels.reference.batchnorm import Affine, Running
from tests.kernels.devices import DEVICE, GPU, TOLERANCE, assert_near
from tests.soak import SOAK

triton = pytest.importorskip("triton")
from lowtide.kernels.triton import batchnorm as kernels  # noqa: E402

NAMES = [
    "identity", "relu", "leaky_relu", "elu", "celu", "silu", "gelu", "hardswish", "tanh", "sigmoid", "softplus",
    "prelu",
]  # fmt: skip
ACTIVATIONS = [*map(Activation.of, NAMES), Activation("gelu", (1.0,))]
SHAPES = {
    "rows": (7, 10),
    "NCL": (2, 3, 9),
    "NCHW": (3, 5, 4, 6),
    "NHWC": (3, 5, 4, 6),
    "NDHWC": (2, 3, 2, 3, 4),
    # More rows than one program holds: 8192, and 2048 of 4 channels that are neighbours.
    "many parts": (9, 2, 30, 31) if not GPU else (70, 5, 50, 61),
    "many parts, NHWC": (5, 3, 20, 21) if not GPU else (70, 37, 50, 61),
}
# Each activation in one layout and each layout with two activations: the interpreter is slow. All of them on a GPU.
CASES = [
    *(("NHWC" if number % 2 else "NCHW", act) for number, act in enumerate(ACTIVATIONS)),
    *((name, Activation.of("prelu" if "NHWC" in name else "leaky_relu")) for name in SHAPES),
    *(product(SHAPES, ACTIVATIONS) if GPU or SOAK else ()),
]


def make(name, dtype=torch.float32, *, mean=3.0):
    shape = SHAPES[name]
    torch.manual_seed(0)
    x = (torch.randn(shape) * 2 + mean).to(dtype)
    dz = torch.randn(shape).to(dtype)
    if "NHWC" in name or name == "NDHWC":
        layout = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
        x, dz = (t.to(memory_format=layout) for t in (x, dz))
    channels = shape[1]
    weight, bias = torch.rand(channels) + 0.5, torch.randn(channels)
    weight[0] *= -1
    return tuple(t.to(DEVICE) for t in (x, dz, weight, bias))


def reference(x, dz, weight, bias, act, slopes=None, residual=None):
    """z, the running statistics, and the gradients by float64 autograd."""
    wide = [None if t is None else t.double().detach().requires_grad_() for t in (x, weight, bias, slopes, residual)]
    running = torch.zeros(x.shape[1], device=DEVICE).double(), torch.ones(x.shape[1], device=DEVICE).double()
    y = F.batch_norm(wide[0], *running, wide[1], wide[2], True, 0.1, 1e-5)
    y = y if residual is None else y + wide[4]
    z = F.prelu(y, wide[3]) if slopes is not None else act(y)
    inputs = [t for t in wide if t is not None]
    return z.detach(), running, torch.autograd.grad(z, inputs, dz.double())


def slopes_of(act, channels):
    return torch.rand(channels, device=DEVICE) if act.name == "prelu" else None


@pytest.mark.parametrize(("name", "act"), CASES, ids=repr)
def test_forward_and_backward_are_those_of_float64(name, act):
    x, dz, weight, bias = make(name)
    slopes = slopes_of(act, x.shape[1])
    z_ref, running_ref, gradients = reference(x, dz, weight, bias, act, slopes)
    running = Running(torch.zeros(x.shape[1], device=DEVICE), torch.ones(x.shape[1], device=DEVICE), 0.1)
    z, mean, invstd, _ = kernels.forward(x, weight, bias, running, act, slopes, eps=1e-5)
    assert_near(z, z_ref, 2e-6)
    assert_near(running.mean, running_ref[0], 2e-6)
    assert_near(running.var, running_ref[1], 2e-6)
    affine = Affine(mean, invstd, weight, bias)
    _, _, _, xhat = kernels.forward(x, weight, bias, Running(), act, slopes, eps=1e-5, keep_xhat=True)
    saved = {"x": x, "xhat": xhat}
    if act.name in ("identity", "leaky_relu"):  # others lose digits where they saturate, which a layer's guard sees
        saved["z"] = z
    for keeps, tensor in saved.items():
        results = kernels.backward(dz, tensor, keeps, affine, act, slopes, training=True)
        for mine, expected in zip(results[: 3 if slopes is None else 4], gradients, strict=True):
            assert_near(mine, expected, 1e-5)


@pytest.mark.parametrize("name", ["NCHW", "many parts, NHWC"])
def test_rebuilding_gives_the_same_bits(name):
    x, _, weight, bias = make(name)
    act = Activation.of("relu")
    z, mean, invstd, xhat = kernels.forward(x, weight, bias, Running(), act, eps=1e-5, keep_xhat=True)
    affine = Affine(mean, invstd, weight, bias)
    assert torch.equal(kernels.normalize(xhat, "xhat", affine, act)[0], z)
    z, mean, invstd, _ = kernels.forward(x, weight, bias, Running(), act, eps=1e-5)
    assert torch.equal(kernels.normalize(x, "x", Affine(mean, invstd, weight, bias), act)[0], z)


@pytest.mark.parametrize("name", ["NCHW", "many parts, NHWC"])
def test_a_mean_of_10000_costs_no_more_than_in_torch(name):
    x, dz, weight, bias = make(name, mean=1e4)
    act = Activation.of("relu")
    z_ref, _, gradients = reference(x, dz, weight, bias, act)
    plain = F.batch_norm(x, None, None, weight, bias, True, 0.1, 1e-5)
    torch_error = float((act(plain).double() - z_ref).norm())
    z, mean, invstd, _ = kernels.forward(x, weight, bias, Running(), act, eps=1e-5)
    assert float((z.double() - z_ref).norm()) <= 1.5 * torch_error
    dx = kernels.backward(dz, x, "x", Affine(mean, invstd, weight, bias), act, training=True)[0]
    assert_near(dx, gradients[0], 2e-2)  # values next to 0 change sides


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["NCHW", "many parts, NHWC"])
def test_16_bits_with_float32_parameters(name, dtype):
    x, dz, weight, bias = make(name, dtype)
    act = Activation.of("leaky_relu")
    z_ref, _, gradients = reference(x, dz, weight, bias, act)
    z, mean, invstd, _ = kernels.forward(x, weight, bias, Running(), act, eps=1e-5)
    assert z.dtype == dtype
    assert_near(z, z_ref, TOLERANCE[dtype])
    results = kernels.backward(dz, x, "x", Affine(mean, invstd, weight, bias), act, training=True)
    for mine, expected in zip(results[:3], gradients, strict=True):
        assert_near(mine, expected, TOLERANCE[dtype])


@pytest.mark.parametrize("name", ["NCHW", "many parts, NHWC"])
def test_a_residual_is_added_and_gets_its_gradient(name):
    x, dz, weight, bias = make(name)
    residual = torch.randn_like(x)
    act = Activation.of("silu")
    z_ref, _, gradients = reference(x, dz, weight, bias, act, residual=residual)
    z, mean, invstd, _ = kernels.forward(x, weight, bias, Running(), act, None, residual, eps=1e-5)
    assert_near(z, z_ref, 2e-6)
    affine = Affine(mean, invstd, weight, bias)
    dx, dweight, dbias, _, dy = kernels.backward(dz, x, "x", affine, act, None, residual, training=True)
    for mine, expected in zip((dx, dweight, dbias, dy), gradients, strict=True):
        assert_near(mine, expected, 1e-5)


def test_without_parameters_and_with_given_statistics():
    x, dz, _, _ = make("NCHW")
    act = Activation.of("relu")
    mean, invstd = torch.randn(5, device=DEVICE), torch.rand(5, device=DEVICE)
    z = kernels.normalize(x, "x", Affine(mean, invstd), act)[0]
    shape = (1, 5, 1, 1)
    y = ((x - mean.view(shape)) * invstd.view(shape)).requires_grad_()
    torch.testing.assert_close(z, y.relu().detach())
    dx = kernels.backward(dz, x, "x", Affine(mean, invstd), act, training=False)[0]
    expected = torch.autograd.grad(y.relu(), y, dz)[0] * invstd.view(shape)
    torch.testing.assert_close(dx, expected)


def test_sums_over_processes_come_between_the_sweeps():
    x, dz, weight, bias = make("NCHW")
    act = Activation.of("relu")
    _, mean, invstd, _ = kernels.forward(x, weight, bias, Running(), act, eps=1e-5)
    affine = Affine(mean, invstd, weight, bias)
    rows = x.numel() // x.shape[1]
    alone = kernels.backward(dz, x, "x", affine, act, training=True)
    summed = kernels.backward(dz, x, "x", affine, act, training=True, sums=lambda a, b: (a / rows, b / rows))
    for actual, expected in zip(summed[:3], alone[:3], strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("channels", [65, 72, 96, 144, 192])
def test_any_number_of_channels_in_NHWC(channels):
    x = (torch.randn(16, channels, 14, 14, device=DEVICE) + 3).to(memory_format=torch.channels_last)
    dz = torch.randn_like(x)
    weight, bias = torch.rand(channels, device=DEVICE) + 0.5, torch.randn(channels, device=DEVICE)
    act = Activation.of("silu")
    z, mean, invstd, _ = kernels.forward(x, weight, bias, Running(), act, eps=1e-5)
    results = kernels.backward(dz, x, "x", Affine(mean, invstd, weight, bias), act, training=True)
    expected, _, gradients = reference(x, dz, weight, bias, act)
    assert_near(z, expected, 2e-6)
    for ours, theirs in zip(results[:3], gradients, strict=True):
        assert_near(ours, theirs, 2e-6)
