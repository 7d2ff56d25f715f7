"""Batches of other shapes on the graph engine: how they run, that they fit, and how many captures that takes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowtide.engines import Step, apply, many_shapes, plan
from lowtide.engines import uncaptured as uncaptured_module
from lowtide.engines.other_shapes import OtherShapes
from lowtide.profiling import profile
from lowtide.workload import Workload
from tests.refusals import warned

from ..tracing.allocator import allocated_peak
from .counting import count_calls
from .planned import smallest_budget, squares
from .test_watch import Attention


def attention(length: int = 64) -> Workload:
    torch.manual_seed(0)
    model = nn.Sequential(*(Attention() for _ in range(4)))
    return Workload(model, squares, torch.randn(4, length, 8), torch.optim.SGD(model.parameters(), lr=0.1))


def on_graph(work: Workload, budget: int | str) -> Step:
    step = apply(plan(work, budget, engine="graph", tune=False), work)
    assert step.plan.engine == "graph"
    return step


def assert_as_plain(step: Step, batch: Tensor) -> None:
    """Loss and gradients are the plain step's bit for bit, and the allocator's peak is within the budget."""
    twin = copy.deepcopy(step.model)
    value, plain = step.loss(batch), squares(twin, batch)
    value.backward()
    plain.backward()
    assert torch.equal(value, plain)
    for ours, theirs in zip(step.model.parameters(), twin.parameters(), strict=True):
        assert ours.grad is not None
        assert torch.equal(ours.grad, theirs.grad)
    step.model.zero_grad()
    peak = allocated_peak(step.model, lambda _, batch: step.loss(batch), batch, step.work.optimizer)
    assert peak <= step.plan.budget_bytes
    step.model.zero_grad()


def test_fifty_lengths_that_only_programs_fit_take_three_captures_and_say_so_once(
    captures: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shared = count_calls(monkeypatch, many_shapes._SymbolicBackend, "__call__")
    work = attention()
    step = on_graph(work, smallest_budget(work, profile(work)))
    monkeypatch.setattr(uncaptured_module, "_worth_a_trace", lambda *_: iter(()))
    for length in range(63, 13, -1):
        assert_as_plain(step, torch.randn(4, length, 8))
    step.loss(work.batch)
    assert (len(captures), len(shared)) == (2, 1)  # the planned shape and the first other one; all others
    lines = [record.getMessage() for record in caplog.records if record.name == "lowtide"]
    assert ["[4, 63, 8]" in lines[0], "captured" in lines[0], "plain step" in lines[1], len(lines)] == [True] * 3 + [2]


def test_larger_batches_within_the_budget_keep_it(captures: list[Any]) -> None:
    step = on_graph(attention(), "70%")
    for length in (65, 66):
        assert_as_plain(step, torch.randn(4, length, 8))


def test_batches_beyond_every_plan_are_warned_about_and_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    work = attention(32)
    step = on_graph(work, smallest_budget(work, profile(work)))
    planned: list[Any] = []
    original = OtherShapes._plan_again

    def counted(self: OtherShapes, *given: Any) -> Any:
        planned.append(given)
        return original(self, *given)

    monkeypatch.setattr(OtherShapes, "_plan_again", counted)
    for length in (96, 97):
        with warned(f"float32[4, {length}, 8]"):
            step.loss(torch.randn(4, length, 8)).backward()
        work.model.zero_grad()
    assert len(planned) == 1


def test_a_planned_batch_between_others_is_not_captured_again(captures: list[Any]) -> None:
    step = on_graph(attention(), "70%")
    first, second = torch.randn(4, 64, 8), torch.randn(4, 60, 8)
    losses = [step.loss(batch) for batch in (first, second, first, second)]
    for value in losses:  # backward runs after the model was restored
        value.backward()
    assert len(captures) == 1
