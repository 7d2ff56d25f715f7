"""Batches of other shapes on the graph engine: how they run, that they fit, and how many captures that takes."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide.engines import Step, apply, many_shapes, plan
from lowtide.engines import uncaptured as uncaptured_module
from lowtide.engines.other_shapes import OtherShapes
from lowtide.planning.candidate import Contender
from lowtide.planning.graph_candidates import GraphCandidates, graph_candidates
from lowtide.planning.programs.program_profile import Forecast
from lowtide.profiling import profile
from lowtide.techniques.technique import Fidelity
from lowtide.tracing.capture.joint import bytes_of
from lowtide.workload import Workload
from tests.models import attention, blocks, squares
from tests.refusals import warned
from tests.soak import SOAK

from ..planning.programs.test_codes import step as gates
from ..tracing.allocator import allocated_peak
from .counting import count_calls
from .planned import IN_BACKWARD, smallest_budget


def stack(length: int = 64, *, depth: int = 4) -> Workload:
    torch.manual_seed(0)
    model = nn.Sequential(*(attention() for _ in range(depth)))
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


def test_many_lengths_that_only_programs_fit_take_three_captures_and_say_so_once(
    captures: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shared = count_calls(monkeypatch, many_shapes._SymbolicBackend, "__call__")
    work = stack(depth=2)
    step = on_graph(work, smallest_budget(work, profile(work)))
    monkeypatch.setattr(uncaptured_module, "_worth_a_trace", lambda *_: iter(()))
    for length in range(63, 13, -1 if SOAK else -7):
        assert_as_plain(step, torch.randn(4, length, 8))
    step.loss(work.batch)
    assert (len(captures), len(shared)) == (2, 1)  # the planned shape and the first other one; all others
    lines = [record.getMessage() for record in caplog.records if record.name == "lowtide"]
    assert ["[4, 63, 8]" in lines[0], "captured" in lines[0], "plain step" in lines[1], len(lines)] == [True] * 3 + [2]


def test_larger_batches_within_the_budget_keep_it(captures: list[Any]) -> None:
    step = on_graph(stack(), "70%")
    for length in (65, 66):
        assert_as_plain(step, torch.randn(4, length, 8))


def test_batches_beyond_every_plan_are_warned_about_and_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    work = stack(32, depth=2)
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
    step = on_graph(stack(), "70%")
    first, second = torch.randn(4, 64, 8), torch.randn(4, 60, 8)
    losses = [step.loss(batch) for batch in (first, second, first, second)]
    for value in losses:  # backward runs after the model was restored
        value.backward()
    assert len(captures) == 1


# -- permissions and options of the plan -----------------------------------------------------------------


def chosen_for(step: Step, batch: Tensor, monkeypatch: pytest.MonkeyPatch) -> Contender:
    """The program that the step chooses for a larger batch, where no way without a capture is offered."""
    monkeypatch.setattr(uncaptured_module.Uncaptured, "__call__", lambda *_: None)
    chosen: list[Contender] = []
    original = GraphCandidates.fastest

    def noted(self: GraphCandidates, *given: Any, **named: Any) -> Contender | None:
        contender = original(self, *given, **named)
        assert contender is not None
        chosen.append(contender)
        return contender

    monkeypatch.setattr(GraphCandidates, "fastest", noted)
    step(batch)
    (contender,) = chosen
    return contender


@pytest.mark.parametrize("forbid", [(), ("fewbit",)], ids=["open", "forbidden"])
def test_batches_of_other_shapes_keep_what_the_plan_forbids(
    forbid: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Forecast, "seconds", lambda _, node: 1e-12 * bytes_of(node))
    work = gates(F.relu, rows=4000)
    step = apply(plan(work, "80%", engine="graph", tune=False, forbid=[IN_BACKWARD, *forbid]), work)
    contender = chosen_for(step, torch.randn(4100, *work.batch.shape[1:]), monkeypatch)
    assert contender.candidate.holds == (() if forbid else ("fewbit",))
    assert contender.peak_bytes <= step.plan.budget_bytes


def test_batches_of_other_shapes_keep_bits_where_only_bits_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    work = gates(F.relu, rows=4000)
    step = apply(plan(work, "85%", engine="graph", tune=False, forbid=IN_BACKWARD, allow="bitwise"), work)
    with warnings.catch_warnings(action="error"):
        contender = chosen_for(step, torch.randn(4100, *work.batch.shape[1:]), monkeypatch)
    assert contender.candidate.price.fidelity is Fidelity.BITWISE


UNWANTED = ["stored_gradients", "compress", "precision", "microbatch"]


@pytest.mark.parametrize(
    ("share", "allow", "forbid"),
    [("70%", (), UNWANTED), ("80%", "changed", [*UNWANTED, IN_BACKWARD])],
    ids=["in backward", "8-bit states"],
)
def test_options_around_a_program_are_priced_once_for_other_shapes(
    share: str, allow: str, forbid: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wide(rows: int) -> Workload:
        model = blocks(6, 128, nn.GELU)
        return Workload(model, squares, torch.randn(rows, 128), torch.optim.AdamW(model.parameters()))

    work, larger = wide(128), wide(136)
    made = plan(work, share, engine="graph", tune=False, allow=allow, forbid=forbid)
    assert made.options
    before = profile(larger)
    with warnings.catch_warnings(action="error"):
        contender = chosen_for(apply(made, work), larger.batch, monkeypatch)
    candidates = graph_candidates(larger, before).offers("graph", compile=False, around=made.options)
    same = next(each for each in candidates if str(each.change) == str(contender.candidate.change))
    expected = graph_candidates(larger, before).contender(same)
    assert expected is not None
    assert contender.storage_peak_bytes == expected.storage_peak_bytes
