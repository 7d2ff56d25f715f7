"""Plans for the graph engine: which there are, what they promise, how they are kept, and what is refused."""

from __future__ import annotations

import contextlib
import gc
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lowtide.engines import plan
from lowtide.engines.lowering.compiled import CompiledLowering, SeededLowering
from lowtide.engines.lowering.ops import OpsLowering
from lowtide.errors import BudgetError, PlanError, TraceError
from lowtide.planning import Plan
from lowtide.planning import graph_candidates as captures
from lowtide.planning.candidate import Permission
from lowtide.planning.graph_candidates import GraphCandidates, graph_candidates
from lowtide.planning.programs.program import simulate
from lowtide.profiling import Profile, profile
from lowtide.techniques import Fidelity
from lowtide.tracing.capture.joint import Joint
from lowtide.tracing.capture.loss import capture_joint, sharing_captures
from lowtide.tracing.plain_aten.gradient_accumulation import held_by_call
from lowtide.workload import Workload
from tests.models import layers, squares
from tests.refusals import refused

from ..contract.outcomes import assert_restored, snapshot
from ..engines.planned import Block, smallest_budget, work_of
from ..engines.test_eager import branching, recurrent
from .steps import chain


@pytest.fixture(scope="module")
def work() -> Workload:
    return chain(3)


@pytest.fixture(scope="module")
def plain(work: Workload) -> Profile:
    return profile(work)


@pytest.fixture(scope="module")
def found(work: Workload, plain: Profile) -> Plan:
    return plan(work, "60%", profile=plain, engine="graph", tune=False)


def test_a_step_that_is_not_captured_is_tried_once_in_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaking(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean() if float(x.sum()) > -math.inf else x.sum()

    tried: list[Workload] = []
    capture = captures._steady_capture

    def noting(work: Workload, plain: Profile) -> Any:
        tried.append(work)
        return capture(work, plain)

    monkeypatch.setattr(captures, "_steady_capture", noting)
    work = Workload(nn.Linear(3, 3), breaking, torch.randn(2, 3))
    plain = profile(work)
    reasons: list[str] = []
    with sharing_captures(work):
        for _ in range(2):
            with pytest.raises(TraceError) as error:
                graph_candidates(work, plain)
            reasons.append(str(error.value))
    assert reasons[0] == reasons[1]
    assert tried == [work]
    for _ in range(2):
        with pytest.raises(TraceError):
            graph_candidates(work, plain)
    assert tried == [work, work, work]


# -- what a plan promises --------------------------------------------------------------------------------


def test_a_program_is_a_plan_that_says_what_it_does(found: Plan) -> None:
    assert found.program is not None
    assert found.engine == "graph"
    assert found.fidelity is Fidelity.BITWISE
    assert found.choices == ()
    assert found.peak_bytes <= found.budget_bytes < found.baseline.peak_bytes
    assert found.seconds == found.baseline.seconds + found.program.seconds
    text = found.explain()
    assert f"recompute {found.program.ops_again} ops" in text
    recomputed = [stage.outline for stage in found.program.stages if not stage.choice.kept]
    assert any("addmm" in outline for outline in recomputed)
    assert all(f"({outline}): recomputed" in text for outline in recomputed)


def test_what_fits_as_it_is_needs_no_program(work: Workload, plain: Profile) -> None:
    fits = plan(work, "100%", profile=plain, engine="graph", tune=False)
    assert fits.program is None
    assert fits.engine == "eager"
    assert (fits.peak_bytes, fits.seconds) == (plain.peak_bytes, plain.seconds)


def test_a_larger_budget_is_never_predicted_slower(work: Workload, plain: Profile) -> None:
    smallest = smallest_budget(work, plain)
    budgets = [smallest + (plain.peak_bytes - smallest) * step // 11 for step in range(12)]
    plans = [plan(work, budget, profile=plain, engine="graph", tune=False) for budget in budgets]
    assert all(each.peak_bytes <= budget for each, budget in zip(plans, budgets, strict=True))
    seconds = [each.seconds for each in plans]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > seconds[-1] == plain.seconds
    assert len(set(seconds)) > 3


def test_both_engines_together_are_never_slower_than_one(work: Workload, plain: Profile) -> None:
    for share in ("85%", "60%"):
        either = plan(work, share, profile=plain, tune=False)
        for engine in ("eager", "graph"):
            assert either.seconds <= plan(work, share, profile=plain, engine=engine, tune=False).seconds


def test_the_smallest_budget_is_named_and_works_and_one_byte_less_does_not(work: Workload, plain: Profile) -> None:
    smallest = smallest_budget(work, plain)
    assert plan(work, smallest, profile=plain, engine="graph", tune=False).peak_bytes == smallest
    with pytest.raises(BudgetError) as error:
        plan(work, smallest - 1, profile=plain, engine="graph", tune=False)
    assert error.value.smallest_bytes == smallest


def test_no_program_is_smaller_than_the_smallest_budget_that_is_named() -> None:
    layers = [nn.Linear(16, 16), nn.Dropout(0.3), nn.Linear(16, 16), nn.Linear(16, 16)]
    work = Workload(nn.Sequential(*layers), squares, torch.randn(6, 16))
    before = profile(work)
    form = GraphCandidates(capture_joint(work), before).form(OpsLowering())
    peaks = [form.forecast.profile(solution.program).peak_bytes for solution in form.solutions()]
    assert smallest_budget(work, before) <= min(peaks)


def test_every_program_simulates_to_what_its_trace_peaks_at(work: Workload, plain: Profile) -> None:
    form = GraphCandidates(capture_joint(work), plain).form(OpsLowering())
    peaks: set[int] = set()
    for solution in form.solutions():
        traced = form.forecast.profile(solution.program)
        forward_and_backward = plain.static_bytes + simulate(solution.program).peak_bytes
        assert traced.storage_peak_bytes == forward_and_backward
        assert traced.peak_bytes >= traced.storage_peak_bytes
        peaks.add(traced.storage_peak_bytes)
    assert len(peaks) > 3


def test_room_is_what_the_program_takes_and_what_the_budget_leaves(work: Workload, plain: Profile, found: Plan) -> None:
    assert found.program is not None
    programs = GraphCandidates(capture_joint(work), plain)
    program = found.program.instructions
    assert found.program.graph == programs.joint.digest
    left = found.budget_bytes - found.peak_bytes
    assert left > 0
    assert found.program.room_bytes == simulate(program).peak_bytes + left
    assert found.program.ops_again == program.recomputed


def test_a_planned_step_and_its_profile_are_freed_with_their_graph() -> None:
    model = layers(4, 16)
    work = Workload(model, lambda given, x: squares(given, x), torch.randn(256, 16))
    before = profile(work)
    made = plan(work, "75%", profile=before, engine="graph", tune=False)
    joint = graph_candidates(work, before).joint
    left = [weakref.ref(each) for each in (model, model[0].weight, joint)]
    del model, work, joint
    gc.collect()
    assert [each() is None for each in left] == [True, True, False]  # programs for other budgets
    del before
    gc.collect()
    assert left[2]() is None
    assert made.program is not None


# -- lowerings -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def candidates(work: Workload, plain: Profile) -> GraphCandidates:
    return graph_candidates(work, plain)


@pytest.mark.parametrize(("compile", "names"), [(False, {"ops"}), (True, {"compiled"}), (None, {"ops", "compiled"})])
def test_compiled_programs_are_offered_where_they_are_wanted(
    compile: bool | None, names: set[str], candidates: GraphCandidates
) -> None:
    assert {each.lowering for each in candidates.offers("graph", compile=compile)} == names


def test_lowerings_of_one_graph_share_its_programs(candidates: GraphCandidates) -> None:
    compiled = candidates.form(CompiledLowering())
    assert candidates.form(SeededLowering()) is compiled
    assert candidates.form(OpsLowering()) is not compiled
    assert compiled.problem.saved_seconds >= 0.0
    assert candidates.form(OpsLowering()).problem.saved_seconds == 0.0


def test_a_measured_peak_moves_the_predictions_of_its_lowering_alone(work: Workload, plain: Profile) -> None:
    candidates = GraphCandidates(capture_joint(work), plain)
    before = {name: peaks(candidates, name) for name in ("ops", "compiled")}
    largest = next(each for each in candidates.offers("graph", compile=True) if each.lowering == "compiled")
    contender = candidates.contender(largest)
    assert contender is not None
    program = candidates.choice(contender, contender.peak_bytes)
    candidates.learn(program, 1000)
    candidates.learn(program, 24)
    assert peaks(candidates, "ops") == before["ops"]
    moved = zip(peaks(candidates, "compiled"), before["compiled"], strict=True)
    assert {after - first for after, first in moved} == {1024}
    candidates.forget()
    assert peaks(candidates, "compiled") == before["compiled"]


def peaks(candidates: GraphCandidates, lowering: str) -> list[int]:
    """Estimated and simulated peaks of a lowering's programs."""
    offers = [each for each in candidates.offers("graph", compile=None) if each.lowering == lowering]
    contenders = [candidates.contender(each) for each in offers]
    simulated = [bytes for each in contenders if each for bytes in (each.peak_bytes, each.storage_peak_bytes)]
    assert simulated
    return [*(each.estimate for each in offers), *simulated]


def test_a_lowering_lowers_what_fits_or_else_its_smallest_program(candidates: GraphCandidates) -> None:
    lowering = CompiledLowering()
    whole = candidates.fastest("graph", lowering, 10**12, permitted=Permission())
    assert whole is not None
    smallest = candidates.fastest("graph", lowering, 1, permitted=Permission())
    assert smallest is not None
    assert smallest.peak_bytes < whole.peak_bytes
    between = (smallest.peak_bytes + whole.peak_bytes) // 2
    fitting = candidates.fastest("graph", lowering, between, permitted=Permission())
    assert fitting is not None
    assert smallest.peak_bytes <= fitting.peak_bytes <= between
    assert {each.candidate.lowering for each in (whole, smallest, fitting)} == {"compiled"}


# -- what is refused -------------------------------------------------------------------------------------


UNCAPTURED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "branch": (lambda: branching(16), (256, 16), "Data-dependent branching"),
    "LSTM": (lambda: recurrent(16), (16, 12, 16), "LSTM"),
}


@pytest.mark.parametrize("name", UNCAPTURED)
def test_what_is_not_captured_is_refused_by_name_and_planned_eagerly(name: str) -> None:
    block, shape, reason = UNCAPTURED[name]
    work = Workload(nn.Sequential(*(block() for _ in range(5))), squares, torch.randn(*shape))
    before = profile(work)
    held = snapshot(work.model)
    with refused("graph", reason, kind=PlanError):
        plan(work, "85%", profile=before, engine="graph", tune=False)
    chosen = plan(work, "85%", profile=before, engine="auto", tune=False)
    assert chosen.engine == "eager"
    assert chosen.choices
    assert_restored(work.model, held)
    assert held_by_call() == 0  # a failed capture leaves no frame evaluator behind, which would cost memory


def test_a_predicted_step_is_not_captured_and_that_is_said(work: Workload) -> None:
    with refused("predicted", kind=PlanError):
        plan(work, "60%", fake=True, engine="graph", tune=False)


@pytest.mark.parametrize("where", [Joint.__init__, GraphCandidates.contender, GraphCandidates.choice, None])
def test_planning_leaves_the_model_as_it_was_also_where_it_fails(where: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("for a test")

    model = nn.Sequential(*(Block(nn.Linear(16, 16)) for _ in range(3)))  # random numbers and statistics
    work = work_of(model, torch.randn(64, 16))
    hook = model[0].register_forward_hook(lambda *_: None)
    model[1].linear.weight.grad = gradient = torch.ones(16, 16)
    before, forward, hooks = snapshot(model), model.forward, dict(model[0]._forward_hooks)
    if where is not None:
        owner = Joint if where is Joint.__init__ else GraphCandidates
        monkeypatch.setattr(owner, where.__name__, fail)
    generator = torch.get_rng_state()
    with contextlib.nullcontext() if where is None else pytest.raises((ZeroDivisionError, PlanError)) as failed:
        plan(work, "80%", engine="graph", tune=False)
    assert failed is None or "for a test" in str(failed.value)
    assert torch.equal(torch.get_rng_state(), generator)
    assert_restored(model, before)
    assert model.forward == forward
    assert dict(model[0]._forward_hooks) == hooks
    assert [p.grad is not None for p in model.parameters()].count(True) == 1
    assert model[1].linear.weight.grad is gradient
    assert torch.equal(gradient, torch.ones(16, 16))
    assert work.optimizer is not None
    assert not work.optimizer.state
    hook.remove()
