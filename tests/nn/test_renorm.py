"""Batch Renormalization, against its definition in plain torch."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lowtide.errors import LowtideError
from lowtide.nn import BatchRenormAct1d, BatchRenormAct2d, BatchRenormAct3d
from tests.nn.buffers import CHANNELS, LARGE, convolution, kept_by_allocator
from tests.nn.plain import NORMS
from tests.nn.raising import raises
from tests.soak import each_value

LAYERS = {1: BatchRenormAct1d, 2: BatchRenormAct2d, 3: BatchRenormAct3d}
SHAPES = {1: (6, 4), 2: (5, 4, 3, 2), 3: (3, 4, 2, 2, 3)}
PHI: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "leaky_relu": F.leaky_relu, "elu": F.elu, "silu": F.silu}
CASES = [
    (strategy, activation)
    for strategy in ("auto", "standard", "checkpoint", "checkpoint_xhat", "inplace", "inplace2")
    for activation in PHI
    if activation in ("leaky_relu", "elu") or not strategy.startswith("inplace")
]


def renorm(x: Tensor, norm: Any, *, rmax: float, dmax: float) -> Tensor:
    """The paper's Algorithm 1 by torch's own ops. ``norm`` is a plain batch norm: its running statistics follow."""
    axes, shape = [i for i in range(x.dim()) if i != 1], [1, -1, *[1] * (x.dim() - 2)]
    mean = x.mean(axes)
    std = (x - mean.view(shape)).square().mean(axes).add(norm.eps).sqrt()
    running_std = (norm.running_var + norm.eps).sqrt()
    with torch.no_grad():
        r = (std / running_std).clamp(1 / rmax, rmax)
        d = ((mean - norm.running_mean) / running_std).clamp(-dmax, dmax)
        norm.running_mean += norm.momentum * (mean - norm.running_mean)
        norm.running_var += norm.momentum * (x.var(axes) - norm.running_var)
    xhat = (x - mean.view(shape)) / std.view(shape) * r.view(shape) + d.view(shape)
    return xhat if norm.weight is None else xhat * norm.weight.view(shape) + norm.bias.view(shape)


def pair(dimension: int, activation: str = "relu", strategy: Any = "auto", **options: Any) -> tuple[Any, Any]:
    """A layer and a plain batch norm, in float64, with the same parameters and running statistics."""
    torch.manual_seed(0)
    norm: Any = NORMS[dimension](4, affine=options.get("affine", True)).double()
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.3, 2.0)
    if norm.weight is not None:
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    layer = LAYERS[dimension](4, activation, strategy, **options).double()
    layer.load_state_dict(norm.state_dict())
    return layer, norm


def batches(dimension: int, count: int) -> list[Tensor]:
    """Batches whose means and spreads differ by channel, so that some channels meet the limits and some do not."""
    shape = SHAPES[dimension]
    scale = torch.tensor([0.2, 1.0, 3.0, 9.0], dtype=torch.float64).view(1, -1, *[1] * (len(shape) - 2))
    return [(torch.randn(shape, dtype=torch.float64) * scale + 1).requires_grad_() for _ in range(count)]


@pytest.mark.parametrize(
    ("dimension", "strategy", "activation"), [(dimension, *case) for case, dimension in each_value(CASES, LAYERS)]
)
def test_forward_gradients_and_running_statistics_are_the_papers(dimension, strategy, activation):
    layer, norm = pair(dimension, activation, strategy, rmax=1.5, dmax=0.7)
    for x in batches(dimension, 4):
        plain_x = x.detach().clone().requires_grad_()
        z = layer(x)
        expected = PHI[activation](renorm(plain_x, norm, rmax=1.5, dmax=0.7))
        torch.testing.assert_close(z, expected)
        weights = torch.randn_like(z)
        actual = torch.autograd.grad((z * weights).sum(), [x, layer.weight, layer.bias])
        wanted = torch.autograd.grad((expected * weights).sum(), [plain_x, norm.weight, norm.bias])
        torch.testing.assert_close(actual, wanted)
        torch.testing.assert_close(layer.running_mean, norm.running_mean)
        torch.testing.assert_close(layer.running_var, norm.running_var)
    assert layer.num_batches_tracked == 4


def test_without_affine_and_with_a_residual():
    layer, norm = pair(2, "relu", affine=False)
    (x,) = batches(2, 1)
    residual = torch.randn_like(x).requires_grad_()
    actual = layer(x, residual)
    expected = F.relu(renorm(x, norm, rmax=3.0, dmax=5.0) + residual)
    torch.testing.assert_close(actual, expected)
    weights = torch.randn_like(x)
    torch.testing.assert_close(
        torch.autograd.grad((actual * weights).sum(), [x, residual]),
        torch.autograd.grad((expected * weights).sum(), [x, residual]),
    )


@pytest.mark.parametrize("limits", [{"rmax": 1.0, "dmax": 0.0}, {"warmup": 3}, {"rmax": 1, "dmax": lambda n: 0}])
def test_it_is_batch_norm_while_the_limits_leave_nothing(limits):
    layer, norm = pair(2, "elu", "inplace", **limits)
    for x in batches(2, 3):
        actual, expected = layer(x), F.elu(norm(x))
        torch.testing.assert_close(actual, expected)
        torch.testing.assert_close(
            torch.autograd.grad(actual.square().sum(), [x, *layer.parameters()]),
            torch.autograd.grad(expected.square().sum(), [x, *norm.parameters()]),
        )
    torch.testing.assert_close(layer.state_dict(), norm.state_dict())
    (x,) = batches(2, 1)
    renormed = "warmup" in limits
    assert torch.allclose(layer(x), F.elu(norm(x))) != renormed


def test_a_schedule_gets_the_number_of_batches_before():
    layer, norm = pair(2, "relu", rmax=lambda n: 1 + n / 2, dmax=lambda n: n / 4)
    for step, x in enumerate(batches(2, 3)):
        expected = F.relu(renorm(x, norm, rmax=1 + step / 2, dmax=step / 4))
        torch.testing.assert_close(layer(x), expected)


def test_no_momentum_is_a_cumulative_average():
    layer, norm = pair(1, momentum=None)
    norm.momentum = None
    for x in batches(1, 3):
        layer(x)
        norm(x)
    torch.testing.assert_close(layer.state_dict(), norm.state_dict())


def test_eval_is_batch_norm_with_the_running_statistics():
    layer, norm = pair(2, "silu")
    (x,) = batches(2, 1)
    layer.eval()
    norm.eval()
    torch.testing.assert_close(layer(x), F.silu(norm(x)))
    assert layer.num_batches_tracked == 0


def test_an_empty_batch_and_one_value_per_channel_leave_the_running_statistics():
    layer, _ = pair(2)
    before = layer.running_mean.clone(), layer.running_var.clone()
    assert layer(torch.empty(0, 4, 3, 3, dtype=torch.float64)).shape == (0, 4, 3, 3)
    with raises(ValueError, "1 value"):
        layer(torch.randn(1, 4, 1, 1, dtype=torch.float64))
    assert torch.equal(before[0], layer.running_mean)
    assert torch.equal(before[1], layer.running_var)


def test_limits_that_are_none_are_an_error():
    with raises(LowtideError, "rmax=0.5"):
        BatchRenormAct2d(4, rmax=0.5)
    with raises(LowtideError, "dmax=-1.0"):
        BatchRenormAct2d(4, dmax=-1.0)


def test_made_from_a_batch_norm_it_shares_its_state():
    norm = nn.BatchNorm2d(4)
    layer = BatchRenormAct2d.from_batch_norm(norm, nn.ReLU())
    layer(torch.randn(3, 4, 2, 2))
    assert layer.running_mean is norm.running_mean
    assert norm.num_batches_tracked == 1
    untracked = BatchRenormAct2d.from_batch_norm(nn.BatchNorm2d(4, track_running_stats=False), None)
    with raises(LowtideError, "running statistics"):
        untracked(torch.randn(3, 4, 2, 2))


@pytest.mark.parametrize("strategy", ["checkpoint", "inplace"])
def test_statistics_are_computed_once(strategy, monkeypatch):
    from lowtide.kernels import batchnorm as kernels

    calls: list[Any] = []
    plain = kernels.statistics
    monkeypatch.setattr(kernels, "statistics", lambda *a: calls.append(a) or plain(*a))
    layer, _ = pair(2, "leaky_relu", strategy)
    (x,) = batches(2, 1)
    layer(x).sum().backward()
    assert len(calls) == 1


@pytest.mark.parametrize(("activation", "strategy"), [("relu", "checkpoint"), ("silu", "auto"), ("elu", "inplace")])
def test_one_buffer_is_kept_per_layer(activation, strategy):
    layers = [BatchRenormAct2d(CHANNELS, activation, strategy) for _ in range(2)]
    model = nn.Sequential(convolution(), layers[0], convolution(), layers[1], convolution())
    assert kept_by_allocator(model, torch.randn(LARGE)) == 2


def test_half_precision_keeps_its_dtype_and_float32_parameters_their_gradients():
    for dtype in (torch.float16, torch.bfloat16):
        layer = BatchRenormAct2d(4, "leaky_relu")
        x = torch.randn(5, 4, 3, 3).to(dtype).requires_grad_()
        z = layer(x)
        z.sum().backward()
        assert (z.dtype, x.grad.dtype, layer.weight.grad.dtype) == (dtype, dtype, torch.float32)


def test_gradients_of_gradients_take_r_and_d_as_constants():
    layer, norm = pair(2, "silu", "checkpoint")
    (x,) = batches(2, 1)
    actual, expected = (_penalty(f(x), x) for f in (layer, lambda x: F.silu(renorm(x, norm, rmax=3.0, dmax=5.0))))
    torch.testing.assert_close(
        torch.autograd.grad(actual, [x, layer.weight]), torch.autograd.grad(expected, [x, norm.weight])
    )


def test_a_checkpoint_around_it_is_refused_since_its_statistics_have_moved():
    layer, _ = pair(2, "relu")
    (x,) = batches(2, 1)
    with raises(LowtideError, "checkpoint"):
        checkpoint(layer, x, use_reentrant=False).sum().backward()
    assert layer.num_batches_tracked == 1


def test_it_compiles_copies_and_pickles():
    layer, norm = pair(2, "relu")
    twin = pickle.loads(pickle.dumps(copy.deepcopy(layer)))
    (x,) = batches(2, 1)
    expected = F.relu(renorm(x, norm, rmax=3.0, dmax=5.0))
    torch.testing.assert_close(twin(x), expected)
    torch.testing.assert_close(twin.running_var, norm.running_var)
    compiled = torch.compile(layer.forward, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), expected)
    torch.testing.assert_close(layer.running_var, norm.running_var)


def _penalty(z: Tensor, x: Tensor) -> Tensor:
    (dx,) = torch.autograd.grad(z.square().sum(), x, create_graph=True)
    return dx.square().sum()
