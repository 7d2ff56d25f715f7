"""Statistics over a process group: two ranks with uneven batches are one process on all of it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide.errors import LowtideError
from lowtide.nn import BatchNormAct1d, BatchNormAct2d, BatchRenormAct2d
from tests.nn.raising import raises
from tests.nn.test_renorm import renorm
from tests.ranks import on_two_ranks

UNEVEN = (3, 5)
PHI: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "silu": F.silu, "leaky_relu": F.leaky_relu, "elu": F.elu}
STRATEGIES: tuple[tuple[Any, str], ...] = (
    ("standard", "relu"),
    ("checkpoint", "relu"),
    ("checkpoint", "silu"),
    ("checkpoint_xhat", "silu"),
    ("inplace", "leaky_relu"),
    ("inplace", "elu"),
    ("inplace2", "elu"),
)
# Relative to a tensor's largest value. The reference is in float64, so the error is all ours.
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}


# -- one process on the concatenation --------------------------------------------------------------------


def equals_one_process(rank: int, sizes: tuple[int, int], dtype: torch.dtype, group: Any = "world") -> None:
    """Three steps of a layer on each rank's part, and of torch's own in float64 on the whole."""
    cases = [*((1, each) for each in STRATEGIES[1:5:3]), *((2, each) for each in STRATEGIES)]
    for dimension, (strategy, activation) in cases:
        built, plain = (BatchNormAct1d, nn.BatchNorm1d) if dimension == 1 else (BatchNormAct2d, nn.BatchNorm2d)
        layer = built(4, activation, strategy, process_group=group, dtype=dtype)
        norm = plain(4, dtype=torch.float64)
        randomise(layer)
        norm.load_state_dict(layer.state_dict())
        for _ in range(3):
            whole = torch.randn(8, 4, *[3, 2][: 2 * dimension - 2], dtype=dtype) * 2 + 3
            weights = torch.randn_like(whole)
            x, dz = (t.split(sizes)[rank] for t in (whole, weights))
            x = x.clone().requires_grad_()
            whole = whole.double().requires_grad_()
            z, expected = layer(x), PHI[activation](norm(whole))
            z.backward(dz)
            expected.backward(weights.double())
            same(z, expected.split(sizes)[rank])
            same(x.grad, whole.grad.split(sizes)[rank])
            same(layer.running_mean, norm.running_mean)
            same(layer.running_var, norm.running_var)
        for mine, theirs in ((layer.weight, norm.weight), (layer.bias, norm.bias)):
            same(summed(mine.grad), theirs.grad)
        assert layer.num_batches_tracked == 3


def uneven_batches_in_float32(rank: int) -> None:
    equals_one_process(rank, UNEVEN, torch.float32)


def uneven_batches_in_float64(rank: int) -> None:
    equals_one_process(rank, UNEVEN, torch.float64, dist.new_group([0, 1]))


def an_empty_batch_on_one_rank(rank: int) -> None:
    equals_one_process(rank, (0, 8), torch.float32)
    equals_one_process(rank, (8, 0), torch.float64)


def large_means_are_as_exact_as_in_one_process(rank: int) -> None:
    """Errors against float64, beside those of torch's batch norm on the concatenation."""
    mine, theirs = torch.zeros(4), torch.zeros(4)
    for _ in range(4):
        whole, weights = torch.randn(16, 4, 8, 8) + 1e4, torch.randn(16, 4, 8, 8)
        layer, norm = BatchNormAct2d(4, "identity", "checkpoint", process_group="world"), nn.BatchNorm2d(4)
        runs = [(layer, torch.float32), (norm, torch.float32), (nn.BatchNorm2d(4).double(), torch.float64)]
        actual = []
        for built, dtype in runs:
            part = slice(8 * rank, 8 * rank + 8) if built is layer else slice(None)
            x = whole[part].to(dtype).requires_grad_()
            z = built(x)
            z.backward(weights[part].to(dtype))
            part = slice(None) if built is layer else slice(8 * rank, 8 * rank + 8)
            actual.append([z.detach()[part], x.grad[part], built.running_mean, built.running_var])
        for errors, values in ((mine, actual[0]), (theirs, actual[1])):
            errors += torch.stack([(v - e).norm() for v, e in zip(values, actual[2], strict=True)])
    assert (mine <= 1.2 * theirs).all(), mine / theirs  # of few channels, each rounded once


def empty_batches_on_all_ranks_leave_the_running_statistics(rank: int) -> None:
    layer = BatchNormAct2d(4, process_group="world")
    x = torch.empty(0, 4, 3, 3, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad.shape == x.shape
    assert layer.weight.grad.tolist() == layer.bias.grad.tolist() == layer.running_mean.tolist() == [0.0] * 4
    assert layer.running_var.tolist() == [1.0] * 4


def one_value_per_rank_is_enough(rank: int) -> None:
    layer, norm = BatchNormAct1d(4, process_group="world"), nn.BatchNorm1d(4, dtype=torch.float64)
    whole = torch.randn(2, 4)
    same(layer(whole[rank : rank + 1]), F.relu(norm(whole.double()))[rank : rank + 1])
    same(layer.running_var, norm.running_var)


def renormalization_over_the_group(rank: int) -> None:
    for sizes in (UNEVEN, (0, 8)):
        layer = BatchRenormAct2d(4, "elu", "inplace", process_group="world", rmax=1.5, dmax=0.5, dtype=torch.float64)
        norm = nn.BatchNorm2d(4, dtype=torch.float64)
        for _ in range(3):
            whole = (torch.randn(8, 4, 3, 2, dtype=torch.float64) * 3 + 1).requires_grad_()
            x = whole.detach().split(sizes)[rank].clone().requires_grad_()
            with counted() as forward:
                z = layer(x)
            with counted() as backward:
                z.square().sum().backward()
            assert len(forward) == len(backward) == 1, (forward, backward)
            expected = F.elu(renorm(whole, norm, rmax=1.5, dmax=0.5))
            expected.square().sum().backward()
            same(z, expected.split(sizes)[rank])
            same(x.grad, whole.grad.split(sizes)[rank])
            same(layer.running_var, norm.running_var)
        same(summed(layer.weight.grad), norm.weight.grad)
        same(summed(layer.bias.grad), norm.bias.grad)


# -- in a model --------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Both kinds have the same state_dict."""

    def __init__(self, channels: int, norm: nn.Module, activation: str | None) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, 4, 3, padding=1, dtype=torch.float64)
        self.norm = norm
        self.phi = (lambda y: y) if activation is None else PHI[activation]

    def forward(self, x: Tensor) -> Tensor:
        return self.phi(self.norm(self.conv(x)))


def models() -> tuple[nn.Sequential, nn.Sequential]:
    """Ours, over the group, and torch's own: blocks by all strategies, in float64."""
    ours, plain = nn.Sequential(), nn.Sequential()
    for at, (strategy, activation) in enumerate(STRATEGIES):
        channels = 4 if at else 2
        layer = BatchNormAct2d(4, activation, strategy, process_group="world", dtype=torch.float64)
        randomise(layer)
        ours.append(Block(channels, layer, None))
        plain.append(Block(channels, nn.BatchNorm2d(4, dtype=torch.float64), activation))
    plain.load_state_dict(ours.state_dict())
    return ours, plain


def equals_plain_model(rank: int, wrap: Callable[[nn.Sequential], nn.Module]) -> None:
    """Three steps of SGD; DDP and FSDP give the mean of the ranks' gradients, so the whole's loss is halved."""
    ours, plain = models()
    wrapped = wrap(ours)
    steps = [torch.optim.SGD(model.parameters(), lr=1e-4) for model in (wrapped, plain)]
    for _ in range(3):
        whole = torch.randn(8, 2, 5, 4, dtype=torch.float64)
        z, expected = wrapped(whole.split(UNEVEN)[rank]), plain(whole)
        same(z, expected.split(UNEVEN)[rank])
        z.square().sum().backward()
        (expected.square().sum() / 2).backward()
        for mine, theirs in zip(wrapped.parameters(), plain.parameters(), strict=True):
            same(full(mine.grad), theirs.grad)
        for mine, theirs in zip(wrapped.buffers(), plain.buffers(), strict=True):
            same(mine, theirs)
        for step in steps:
            step.step()
            step.zero_grad()


def ddp_equals_one_process(rank: int) -> None:
    equals_plain_model(rank, DistributedDataParallel)


def fsdp_equals_one_process(rank: int) -> None:
    equals_plain_model(rank, _sharded)


def _sharded(model: nn.Sequential) -> nn.Module:
    mesh = init_device_mesh("cpu", (2,))
    for block in model:
        fully_shard(block, mesh=mesh)  # parameters of a block are freed after its forward, until its backward
    return fully_shard(model, mesh=mesh)


def one_collective_forward_and_one_backward(rank: int) -> None:
    model, _ = models()
    x = torch.randn(UNEVEN[rank], 2, 5, 4, dtype=torch.float64)
    with counted() as forward:
        z = model(x)
    with counted() as backward:
        z.sum().backward()
    assert len(forward) == len(backward) == len(STRATEGIES), (forward, backward)
    assert all("allgather" in name for name in forward), forward
    assert all("allreduce" in name for name in backward), backward


def eval_needs_no_group_and_no_collective(rank: int) -> None:
    model, plain = (m.eval() for m in models())
    x = torch.randn(2, 2, 5, 4, dtype=torch.float64)
    with counted() as seen:
        z = model(x)
        z.sum().backward()
    assert not seen
    same(z, plain(x))


def without_gradients_the_statistics_are_still_the_groups(rank: int) -> None:
    """As in a teacher in training mode: its output is read by a layer that learns."""
    layer, norm = BatchNormAct2d(4, process_group="world"), nn.BatchNorm2d(4, dtype=torch.float64)
    conv = nn.Conv2d(4, 2, 3)
    whole = torch.randn(8, 4, 5, 5)

    class Student(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.conv = layer, conv

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                z = self.layer(x)
            return self.conv(z)

    Student()(whole.split(UNEVEN)[rank]).sum().backward()
    z = F.relu(norm(whole.double())).split(UNEVEN)[rank]
    expected = copy.deepcopy(conv).double()
    expected.zero_grad()
    expected(z.detach()).sum().backward()
    torch.testing.assert_close(conv.weight.grad.double(), expected.weight.grad, rtol=1e-5, atol=1e-5)  # sums of 45
    same(layer.running_mean, norm.running_mean)


# -- groups ------------------------------------------------------------------------------------------------


def a_group_of_one_is_a_plain_layer(rank: int) -> None:
    own = [dist.new_group([r]) for r in (0, 1)]
    layer, norm = BatchNormAct2d(4, process_group=own[rank]), nn.BatchNorm2d(4, dtype=torch.float64)
    x = torch.randn(UNEVEN[rank], 4, 3, 2)
    same(layer(x), F.relu(norm(x.double())))
    with raises(ValueError, "1 value"):
        layer(torch.randn(1, 4, 1, 1))
    with raises(LowtideError, "member"):
        BatchNormAct2d(4, process_group=own[1 - rank])(x)
    with raises(LowtideError, "'all'"):
        BatchNormAct2d(4, process_group="all")(x)


def copies_and_pickles_of_a_layer_over_the_world_work(rank: int) -> None:
    layer = BatchNormAct2d(4, process_group="world")
    x = torch.randn(UNEVEN[rank], 4, 3, 2)
    expected = copy.deepcopy(layer)(x)
    assert torch.equal(pickle.loads(pickle.dumps(layer))(x), expected)
    assert torch.equal(layer(x), expected)


def gradients_of_gradients_are_a_clear_error(rank: int) -> None:
    layer = BatchNormAct2d(4, "silu", process_group="world")
    x = torch.randn(UNEVEN[rank], 4, 3, 2, requires_grad=True)
    with raises(LowtideError, "process group", "BatchNormAct2d"):
        torch.autograd.grad(layer(x).sum(), x, create_graph=True)


def test_without_a_process_group_the_error_says_what_to_do():
    layer = BatchNormAct2d(4, process_group="world")
    with raises(LowtideError, "torch.distributed.init_process_group()"):
        layer(torch.randn(2, 4, 3, 3))
    assert layer.eval()(torch.randn(2, 4, 3, 3)).shape == (2, 4, 3, 3)


# -- two processes -----------------------------------------------------------------------------------------

test_on_two_ranks = on_two_ranks(
    uneven_batches_in_float32,
    uneven_batches_in_float64,
    an_empty_batch_on_one_rank,
    empty_batches_on_all_ranks_leave_the_running_statistics,
    large_means_are_as_exact_as_in_one_process,
    one_value_per_rank_is_enough,
    renormalization_over_the_group,
    one_collective_forward_and_one_backward,
    eval_needs_no_group_and_no_collective,
    without_gradients_the_statistics_are_still_the_groups,
    a_group_of_one_is_a_plain_layer,
    copies_and_pickles_of_a_layer_over_the_world_work,
    gradients_of_gradients_are_a_clear_error,
    ddp_equals_one_process,
    fsdp_equals_one_process,
)


class counted(TorchDispatchMode):
    """The collectives that the backends are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __enter__(self) -> list[str]:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().__enter__()
        return self.seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.seen.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def randomise(layer: Any) -> None:
    nn.init.normal_(layer.weight)
    nn.init.normal_(layer.bias)


def summed(gradient: Tensor) -> Tensor:
    whole = gradient.clone()
    dist.all_reduce(whole)
    return whole


def full(gradient: Any) -> Tensor:
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


def same(actual: Any, expected: Any) -> None:
    largest = max([1.0, *expected.detach().abs().flatten().tolist()])
    tolerance = TOLERANCE.get(actual.dtype, 0.0) * largest
    torch.testing.assert_close(actual.to(expected.dtype), expected, rtol=0, atol=tolerance)
