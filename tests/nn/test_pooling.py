"""Max pooling that keeps its input alone gives torch's results, bit for bit."""

import pytest
import torch
from torch import nn

from lowtide.nn.pooling import can_pool, max_pool
from tests.soak import in_soak

POOLS = [
    nn.MaxPool2d(2),
    nn.MaxPool2d(3, stride=2, padding=1),
    nn.MaxPool2d((3, 2), stride=(1, 2), padding=(1, 0), dilation=(2, 1)),
    nn.MaxPool2d(3, stride=2, ceil_mode=True),
    nn.MaxPool3d(2),
    nn.MaxPool3d((1, 3, 3), stride=(1, 2, 2), padding=(0, 1, 1)),
]


def batch(pool: nn.Module, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    shape = (2, 3, 9, 8) if isinstance(pool, nn.MaxPool2d) else (2, 3, 5, 9, 8)
    return torch.randint(-3, 4, shape).to(dtype)  # with ties


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, *in_soak([torch.float64])])
@pytest.mark.parametrize("pool", POOLS, ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "channels last", "cut"])
def test_it_gives_torchs_bits(pool, dtype, layout):
    x = batch(pool, dtype)
    if layout == "channels last":
        x = x.to(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)
    elif layout == "cut":
        x = x[..., 1:]
    results = []
    for run in (pool, lambda x: max_pool(pool, x)):
        leaf = x.clone().requires_grad_()
        z = run(leaf)
        gradient = torch.arange(z.numel()).view(z.shape).to(dtype)
        results.append((z, *torch.autograd.grad(z, leaf, gradient)))
    for actual, expected in zip(results[1], results[0], strict=True):
        assert torch.equal(actual, expected)
        assert actual.stride() == expected.stride()


@pytest.mark.parametrize("pool", POOLS, ids=str)
def test_it_keeps_its_input_alone(pool):
    saved = []
    x = batch(pool).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()) or t, lambda t: t):
        max_pool(pool, x)
    assert saved == [x.data_ptr()]


@pytest.mark.parametrize("pool", POOLS, ids=str)
def test_gradients_have_gradients(pool):
    shape = (1, 2, 5, 4) if isinstance(pool, nn.MaxPool2d) else (1, 1, 3, 4, 4)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: max_pool(pool, x), x)
    assert torch.autograd.gradgradcheck(lambda x: max_pool(pool, x), x)


def test_an_unbatched_image_and_a_step_without_gradients():
    pool, x = nn.MaxPool2d(2), torch.randn(3, 4, 4, requires_grad=True)
    assert torch.equal(max_pool(pool, x), pool(x))
    max_pool(pool, x).sum().backward()
    with torch.no_grad():
        assert torch.equal(max_pool(pool, x), pool(x))


def test_compiled_and_under_torch_func_torchs_own_runs():
    pool, x = nn.MaxPool2d(2), torch.randn(2, 3, 4, 4)
    compiled = torch.compile(lambda x: max_pool(pool, x), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x.requires_grad_()), pool(x))
    actual = torch.func.grad(lambda x: max_pool(pool, x).sum())(x.detach())
    assert torch.equal(actual, torch.func.grad(lambda x: pool(x).sum())(x.detach()))


def test_what_it_cannot_stand_for():
    class Own(nn.MaxPool2d):
        pass

    assert not can_pool(nn.MaxPool2d(2, return_indices=True))
    assert not can_pool(Own(2))
    assert not can_pool(nn.AvgPool2d(2))


def test_forward_mode_runs_torchs_own():
    pool, x = nn.MaxPool2d(2), torch.randn(1, 2, 4, 4, requires_grad=True)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        assert torch.autograd.forward_ad.unpack_dual(max_pool(pool, dual)).tangent is not None
