"""Shapes that share a capture: as plain PyTorch, branches respected, and freed with the step."""

from __future__ import annotations

import copy
import gc
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowtide import Workload
from lowtide.engines import Step, many_shapes
from lowtide.engines import uncaptured as uncaptured_module
from lowtide.profiling import profile
from lowtide.tracing.capture.loss import CompiledLoss
from tests.models import Call, attention, squares
from tests.refusals import warned

from .counting import count_calls
from .planned import smallest_budget
from .test_other_shapes import assert_as_plain, on_graph


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Grows with each capture for many shapes."""
    return count_calls(monkeypatch, many_shapes._SymbolicBackend, "__call__")


@pytest.fixture(autouse=True)
def _programs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run no batch as the plain step, nor with checkpoints."""
    monkeypatch.setattr(uncaptured_module.Uncaptured, "__call__", lambda *_: None)


def branching(branch: int = 0, root: bool = False) -> Call:
    """Takes another way where a sequence is short, and divides by a root of its length."""

    def run(m: Any, x: Tensor) -> Tensor:
        x = m.layers(x)
        x = x / x.shape[1] ** 0.5 if root else x
        return x * 3 if x.shape[1] < branch else x.tanh()

    return Call(run, layers=nn.Sequential(*(attention() for _ in range(2))))


def planned(model: nn.Module, batch: Tensor) -> Step:
    torch.manual_seed(0)
    work = Workload(model, squares, batch, torch.optim.SGD(model.parameters(), lr=0.1))
    return on_graph(work, smallest_budget(work, profile(work)))


def test_batch_and_length_vary_together(shared: list[Any], captures: list[Any]) -> None:
    torch.manual_seed(0)
    step = planned(nn.Sequential(*(attention() for _ in range(2))), torch.randn(4, 48, 8))
    for count, length in ((4, 40), (4, 41), (3, 44), (2, 20), (4, 46)):
        assert_as_plain(step, torch.randn(count, length, 8))
    assert (len(captures), len(shared)) == (1, 2)  # one for lengths, one for lengths and counts


def test_statistics_and_random_numbers_are_the_plain_ones(shared: list[Any]) -> None:
    """Buffers that the graph writes stand behind inputs that are sizes."""
    torch.manual_seed(0)
    parts = [(nn.Conv2d(3 if not i else 8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(True), nn.Dropout(0.2)) for i in range(2)]
    step = planned(nn.Sequential(*(nn.Sequential(*each) for each in parts)), torch.randn(8, 3, 24, 24))
    for count, size in ((7, 24), (6, 24), (3, 24), (5, 20), (4, 17)):
        batch = torch.randn(count, 3, size, size)
        twin = copy.deepcopy(step.model)
        found: list[list[Tensor]] = []
        for model, loss in ((step.model, step.loss), (twin, partial(squares, twin))):
            torch.manual_seed(3)
            value = loss(batch)
            value.backward()
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            found.append([value.detach(), *gradients, *model.buffers(), torch.get_rng_state()])
            model.zero_grad()
        assert len(found[0]) == len(found[1])
        assert all(map(torch.equal, *found))
    assert len(shared) == 2


def test_a_branch_on_the_length_is_respected(shared: list[Any]) -> None:
    torch.manual_seed(0)
    step = planned(branching(branch=30), torch.randn(4, 48, 8))
    for length in (40, 41, 44):
        assert_as_plain(step, torch.randn(4, length, 8))
    with warned("planned anew"):
        assert_as_plain(step, torch.randn(4, 20, 8))
    assert_as_plain(step, torch.randn(4, 43, 8))


def test_numbers_that_dynamo_would_round_otherwise_are_captured_alone(shared: list[Any], captures: list[Any]) -> None:
    torch.manual_seed(0)
    step = planned(branching(root=True), torch.randn(4, 48, 8))
    for length in (40, 41, 44):
        assert_as_plain(step, torch.randn(4, length, 8))
    assert (len(captures), len(shared)) == (3, 1)


def test_undo_frees_the_shared_captures() -> None:
    torch.manual_seed(0)
    step = planned(nn.Sequential(*(attention() for _ in range(2))), torch.randn(4, 48, 8))
    for length in (40, 41, 44):
        step.loss(torch.randn(4, length, 8))
    step.undo()
    gc.collect()
    held = [type(each) for each in gc.get_objects()]
    assert not held.count(CompiledLoss)
    assert not held.count(many_shapes.ManyShapes)
