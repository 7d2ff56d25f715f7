"""Captured graphs write buffers: batch norms move statistics, and counters count."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from lowtide import Workload
from lowtide.engines.graph import planned_loss
from lowtide.planning.solvers.solver import fastest_program
from lowtide.tracing.capture.batchnorm import is_batch_norm, is_left_batch_norm, without_statistics
from lowtide.tracing.capture.joint import Joint
from lowtide.tracing.capture.loss import capture_joint
from tests.models import squares

_aten = torch.ops.aten
FUNCTIONAL = _aten._native_batch_norm_legit_functional.default


class Net(nn.Module):
    """Convolution, norm and ReLU, ``times`` over."""

    def __init__(self, times: int = 1, *, watched: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.norm = nn.BatchNorm2d(3)
        self.times, self.watched = times, watched

    def forward(self, x: Tensor) -> Tensor:
        seen = self.norm.running_mean.sum() if self.watched and self.norm.running_mean is not None else x.new_zeros(())
        for _ in range(self.times):
            x = self.norm(self.conv(x)).relu()
        return x.mean() + seen


def work_of(net: nn.Module) -> Workload:
    return Workload(net, squares, torch.randn(4, 3, 8, 8))


def targets(joint: Joint) -> list[object]:
    return [node.target for node in joint.module.graph.nodes]


def test_a_batch_norm_moves_its_statistics_itself_and_counts_without_an_op() -> None:
    joint = capture_joint(work_of(Net(2)))
    assert FUNCTIONAL not in targets(joint)
    assert sum(map(is_batch_norm, joint.forward)) == 2
    inputs = {node.name for node in joint.primals}
    assert sum(node.name in inputs for node in joint.outputs[:-1]) == 2  # but what is counted twice, by two ops
    assert capture_joint(work_of(Net())).counters[0][1] == 1


class Follows(nn.Module):
    """One buffer takes over what another would count to, which itself stays."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("mine", torch.tensor(5))
        self.register_buffer("theirs", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.theirs.copy_(self.mine + 1)
        return x * self.weight


def test_a_buffer_that_another_is_made_of_does_not_count() -> None:
    work = Workload(Follows(), squares, torch.randn(4, 3))
    assert capture_joint(work).counters == []
    planned_loss(work, lambda joint: fastest_program(joint, 2**40))(work.batch).backward()
    assert work.model.get_buffer("mine") == 5
    assert work.model.get_buffer("theirs") == 6


def test_statistics_that_the_model_reads_are_moved_at_the_end() -> None:
    joint = capture_joint(work_of(Net(watched=True)))
    assert FUNCTIONAL in targets(joint)
    assert all(is_left_batch_norm(node) for node in joint.forward if is_batch_norm(node))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    "net",
    [Net, lambda: Net(3), lambda: Net(2, watched=True), lambda: Net(2).eval()],
    ids=["once", "shared", "watched", "evaluating"],
)
def test_steps_leave_the_statistics_of_plain_steps(net: Callable[[], Net], device: str) -> None:
    torch.manual_seed(0)
    plain = net().to(device)
    other = copy.deepcopy(plain)
    works = [Workload(m, squares, torch.randn(4, 3, 8, 8, device=device)) for m in (plain, other)]
    batch = works[0].batch
    loss = planned_loss(works[1], lambda joint: fastest_program(joint, 2**40))
    for _ in range(3):
        for value in (works[0].compute_loss(batch=batch), loss(batch)):
            value.backward()
    # A batch norm whose statistics the model reads is PyTorch's own, where the plain step calls cuDNN's.
    same = torch.equal if device == "cpu" or not plain.watched else partial(torch.allclose, rtol=1e-3, atol=1e-5)
    for mine, theirs in zip(other.state_dict().values(), plain.state_dict().values(), strict=True):
        assert same(mine, theirs)
    assert all(same(p.grad, q.grad) for p, q in zip(other.parameters(), plain.parameters(), strict=True))


def test_a_run_again_leaves_the_statistics_alone() -> None:
    x, ones, zeros = torch.randn(4, 3, 8, 8), torch.ones(3), torch.zeros(3)
    mean, var = zeros.clone(), ones.clone()
    args = (x, ones, zeros, mean, var, True, 0.1, 1e-5)
    first = _aten._native_batch_norm_legit.default(*args)
    moved = mean.clone()
    op, rest = without_statistics(_aten._native_batch_norm_legit.default, args)
    assert all(map(torch.equal, op(*rest), first))
    assert torch.equal(mean, moved)
    assert without_statistics(_aten.cudnn_batch_norm.default, args)[1][3:5] == (None, None)
