"""``lowtide.plan``: plans with close predictions are timed before one is chosen."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NoReturn

import pytest
import torch
from torch import nn

import lowtide
from lowtide.engines import tune
from lowtide.engines.graph import PlannedLoss
from lowtide.engines.lowering import compiled
from lowtide.errors import BudgetError, PlanError
from lowtide.planning import Plan
from lowtide.planning.candidate import Permission
from lowtide.profiling import Profile, timing
from lowtide.techniques.technique import Fidelity, Option
from lowtide.workload import Workload
from tests.models import blocks, squares

from ..contract.outcomes import assert_restored, snapshot


def chain() -> Workload:
    model = blocks(4, 32, nn.GELU)
    optimizer = torch.optim.Adam(model.parameters())
    return Workload(model, squares, torch.randn(512, 32), optimizer)


@pytest.fixture
def work_in_backward() -> Workload:
    """Parameters, gradients and states outweigh all else."""
    model = blocks(6, 128, nn.GELU)
    optimizer = torch.optim.AdamW(model.parameters())
    return Workload(model, squares, torch.randn(128, 128), optimizer)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Seconds that each engine is said to take; the plain step takes one."""
    seconds = {"graph": 2.0, "eager": 2.0}

    def times(_: Workload, plans: Sequence[Plan | None]) -> tuple[list[float], dict[int, int], list[str]]:
        return [seconds[plan.engine] if plan else 1.0 for plan in plans], {}, []

    monkeypatch.setattr(tune, "_times", times)
    return seconds


def test_the_plan_that_measures_faster_is_taken(clock: dict[str, float]) -> None:
    clock["graph"] = 1.5
    chosen = lowtide.plan(chain(), "70%")
    assert chosen.engine == "graph"
    assert chosen.seconds == pytest.approx(chosen.baseline.seconds + 0.5)
    assert any("Timed before choosing" in note for note in chosen.notes)


def test_a_plan_timed_while_the_machine_is_slow_saves_its_share_of_the_profiled_step(clock: dict[str, float]) -> None:
    clock.update(graph=0.9, eager=0.9)  # 0.1 s less than the plain step, which was profiled at some milliseconds
    chosen = lowtide.plan(chain(), "70%")
    assert chosen.seconds == pytest.approx(0.9 * chosen.baseline.seconds)


def test_a_stricter_plan_is_taken_where_both_are_as_fast(clock: dict[str, float]) -> None:
    work = chain()
    loose, strict = _rivals(work)
    clock.update({loose.engine: 1.5, strict.engine: 1.52})
    assert tune._fastest(work, [loose, strict])[0].engine == strict.engine
    clock[strict.engine] = 1.6
    assert tune._fastest(work, [loose, strict])[0].engine == loose.engine


def test_a_plan_whose_step_fails_is_left_out_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(step: Workload, whole: bool = False) -> list[float]:
        if isinstance(step.loss, PlannedLoss):
            raise torch.OutOfMemoryError("the GPU is full\nTry something")
        return [1.0]

    monkeypatch.setattr(tune, "best_seconds", seconds)
    chosen = lowtide.plan(chain(), "70%")
    assert chosen.engine == "eager"
    assert any("the GPU is full" in note for note in chosen.notes)


def test_timing_is_skipped_on_request_and_where_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(*_: object, **__: object) -> list[float]:
        raise AssertionError("timed")

    monkeypatch.setattr(tune, "_times", seconds)
    lowtide.plan(chain(), "70%", tune=False)
    lowtide.plan(chain(), "70%", fake=True)
    lowtide.plan(chain(), "100%")
    monkeypatch.setattr(timing.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(timing.distributed, "get_world_size", lambda: 2)
    lowtide.plan(chain(), "70%")  # ranks do not choose by their own clocks


def test_plans_that_share_a_change_of_the_optimizer_are_timed_one_after_another(work_in_backward: Workload) -> None:
    optimizer_in_backward = "optimizer_in_backward"
    rival = lowtide.plan(work_in_backward, "66%", engine="graph", tune=False)
    assert optimizer_in_backward in [option.technique for option in rival.options]
    seconds, _, notes = tune._times(work_in_backward, [rival, rival])
    assert max(seconds) < float("inf"), notes


def test_timing_changes_nothing() -> None:
    work = chain()
    before = snapshot(work.model)
    state = torch.get_rng_state()
    lowtide.plan(work, "70%")
    assert_restored(work.model, before)
    assert work.optimizer is not None
    assert not work.optimizer.state  # which timed steps made
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in work.model.parameters())


@pytest.mark.parametrize(("compile", "compiles"), [(False, False), ("auto", False), (True, True)])
def test_code_is_compiled_where_that_is_asked_for(compile: bool | Literal["auto"], compiles: bool) -> None:
    chosen = lowtide.plan(chain(), "70%", engine="graph", compile=compile, tune=False)
    assert chosen.program is not None
    assert (chosen.program.lowering == "compiled") is compiles
    assert chosen.fidelity is (Fidelity.ROUNDOFF if compiles else Fidelity.BITWISE)
    assert any("Inductor" in note for note in chosen.notes) is compiles
    assert Plan.from_json(chosen.to_json()) == chosen


def _rivals(work: Workload) -> tuple[Plan, Plan]:
    """The eager plan said to be of a looser class, and the graph engine's."""
    eager = lowtide.plan(work, "70%", engine="eager", tune=False)
    loose = replace(eager, choices=tuple(replace(c, fidelity=Fidelity.ROUNDOFF) for c in eager.choices))
    return loose, lowtide.plan(work, "70%", engine="graph", tune=False)


class Allocator:
    """Stands for a measured step: the first ``over`` compiled plans take one byte more than their budget."""

    def __init__(self, over: int) -> None:
        self.over = over
        self.measured: list[Plan] = []

    def times(self, _: Workload, plans: Sequence[Plan | None]) -> tuple[list[float], dict[int, int], list[str]]:
        peaks: dict[int, int] = {}
        for place, plan in enumerate(plans):
            if plan is not None and plan.program is not None and plan.program.lowering == "compiled":
                self.measured.append(plan)
                peaks[place] = plan.budget_bytes + 1 if len(self.measured) <= self.over else plan.peak_bytes
        return [1.0 for _ in plans], peaks, []


@pytest.mark.parametrize(("over", "lowering"), [(0, "compiled"), (1, "compiled"), (3, "ops")])
def test_a_compiled_plan_that_measures_above_its_budget_is_planned_again_then_given_up(
    over: int, lowering: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = chain()
    plain = lowtide.profile(work)
    allocator = Allocator(over)
    monkeypatch.setattr(tune, "_times", allocator.times)
    budget = int(0.8 * plain.peak_bytes)
    chosen = lowtide.plan(work, budget, profile=plain, engine="graph", compile=True)
    assert chosen.program is not None
    assert chosen.program.lowering == lowering
    assert chosen.peak_bytes <= budget
    assert len(allocator.measured) == min(over + 1, 3)
    assert any("Compiled plans measured" in note for note in chosen.notes) == (lowering == "ops")


def test_a_plan_that_measures_above_its_budget_leaves_those_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    work = chain()
    plain = lowtide.profile(work)
    budget = lowtide.plan(work, "70%", profile=plain, engine="eager", tune=False).peak_bytes
    more, seen = 1000, list[Plan]()

    def times(_: Workload, plans: Sequence[Plan | None]) -> tuple[list[float], dict[int, int], list[str]]:
        seen.extend(plan for plan in plans if plan is not None)
        return [1.0 for _ in plans], {index: plan.peak_bytes + more for index, plan in enumerate(plans) if plan}, []

    monkeypatch.setattr(tune, "_times", times)
    chosen = lowtide.plan(work, budget, profile=plain, engine="eager")
    assert chosen.budget_bytes == budget
    assert any(plan.peak_bytes > budget - more for plan in seen)  # at first
    assert chosen.peak_bytes + more <= budget
    with pytest.raises(BudgetError) as refused:
        lowtide.plan(work, 1, profile=plain, engine="eager")
    smallest = refused.value.smallest_bytes
    with pytest.raises(BudgetError) as refused:
        lowtide.plan(work, smallest, profile=plain, engine="eager")
    assert lowtide.plan(work, refused.value.smallest_bytes, profile=plain, engine="eager").peak_bytes == smallest


class _Asked(Exception):
    pass


@pytest.mark.parametrize(
    ("device", "tunes", "compile"), [("cuda", True, None), ("cuda", False, False), ("cpu", True, False)]
)
def test_plans_compile_of_themselves_only_where_they_are_measured_on_a_gpu(
    device: str, tunes: bool, compile: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool | None] = []

    def plans(*_: Any, engine: str, compile: bool | None, **__: Any) -> NoReturn:
        asked.append(compile)
        raise BudgetError("none") if engine == "graph" else _Asked

    work = chain()
    plain = lowtide.profile(work)
    monkeypatch.setattr(tune, "plans", plans)
    monkeypatch.setattr(Workload, "device", torch.device(device))
    with pytest.raises(_Asked):
        lowtide.plan(work, "70%", profile=plain, tune=tunes)
    assert asked == [*([True] if compile is None else []), compile]


@pytest.mark.parametrize(("seconds", "is_taken"), [(0.9, True), (1.1, False), (math.inf, False)])
def test_a_compiled_plan_is_taken_at_once_where_it_is_measured_as_fast_as_the_plain_step(
    seconds: float, is_taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def times(_: Workload, plans: Sequence[Plan | None]) -> tuple[list[float], dict[int, int], list[str]]:
        return [1.0, *(seconds for _ in plans[1:])], {}, []

    work = chain()
    search = partial(tune.plans, work, "80%", lowtide.profile(work), permitted=Permission.of(()))
    monkeypatch.setattr(tune, "_times", times)
    chosen = tune._compiled_alone(work, search.args[2], search, "auto", tune._Trouble())
    assert (chosen is not None) == is_taken
    if chosen is not None:
        assert chosen.program is not None
        assert chosen.program.lowering == "compiled"
        assert "not looked for" in chosen.notes[-1]
    assert tune._compiled_alone(work, search.args[2], search, "eager", tune._Trouble()) is None
    too_small = partial(tune.plans, work, 1, search.args[2], permitted=Permission.of(()))
    assert tune._compiled_alone(work, search.args[2], too_small, "auto", tune._Trouble()) is None


@pytest.mark.gpu
def test_states_that_a_plan_moves_to_the_host_do_not_count_in_its_measured_peak() -> None:
    model = blocks(4, 1024, nn.GELU).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    work = Workload(model, squares, torch.randn(64, 1024, device="cuda"), optimizer)
    plain = lowtide.profile(work)
    with pytest.raises(BudgetError) as refused:
        lowtide.plan(work, 1, profile=plain, compile=False)
    smallest = refused.value.smallest_bytes
    assert smallest is not None
    chosen = lowtide.plan(work, smallest, profile=plain, compile=False)
    assert "optimizer_state" in {option.technique for option in chosen.options}
    assert lowtide.verify(work, chosen).ok


def test_a_plan_that_cannot_be_built_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> NoReturn:
        raise RuntimeError("no compiler")

    work = chain()
    plain = lowtide.profile(work)
    monkeypatch.setattr(compiled, "compile_graph", failing)
    loose, strict = (
        lowtide.plan(work, "80%", profile=plain, engine="graph", compile=compile, tune=False)
        for compile in (True, False)
    )
    best = tune._fastest(work, [loose, strict])[0].program
    assert best is not None
    assert best.lowering != "compiled"
    chosen = lowtide.plan(work, "80%", profile=plain, engine="graph", compile=True)
    assert chosen.program is not None
    assert chosen.program.lowering != "compiled"
    assert any("no compiler" in note for note in chosen.notes)


def test_a_step_that_never_keeps_its_budget_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    work = chain()
    plain = lowtide.profile(work)
    above = 2 * plain.peak_bytes

    def times(_: Workload, plans: Sequence[Plan | None]) -> tuple[list[float], dict[int, int], list[str]]:
        return [1.0 for _ in plans], dict.fromkeys(range(len(plans)), above), []

    monkeypatch.setattr(tune, "_times", times)
    with pytest.raises(BudgetError):
        lowtide.plan(work, "90%", profile=plain, engine="eager")
    monkeypatch.setattr(tune, "_times", lambda _, plans: ([math.inf for _ in plans], {}, []))
    with pytest.raises(PlanError, match="runs"):
        lowtide.plan(work, "90%", profile=plain, engine="eager")


@pytest.mark.parametrize("ways", [{"engine": "eager"}, {"fake": True}, {"device": "h200"}], ids=str)
def test_a_wish_to_compile_what_cannot_be_compiled_is_refused(ways: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match="compile"):
        lowtide.plan(chain(), "70%", compile=True, **ways)


# -- recorded as CUDA graphs -----------------------------------------------------------------------------

_Planned = tuple[Workload, Profile, Plan]


@pytest.fixture(scope="module")
def on_graph() -> _Planned:
    work = Workload(blocks(4, 16), squares, torch.randn(256, 16))
    plain = lowtide.profile(work)
    chosen = lowtide.plan(work, "75%", profile=plain, engine="graph", compile=False, tune=False)
    return work, plain, replace(chosen, seconds=1.0, peak_bytes=chosen.budget_bytes)


@pytest.mark.parametrize(
    ("measured", "is_recorded", "reserved"),
    [
        ([(0.5, -1)], True, []),  # faster, a byte below the budget
        ([(0.98, -1)], False, []),  # as fast as without, within noise
        ([(0.5, 100), (0.6, -1)], True, [100]),
        ([(0.5, 100), (0.6, 110), (0.7, -1)], True, [100, 110]),
        ([(0.5, 100), (0.6, 110), (0.7, 5), (0.1, -1)], False, [100, 110]),  # enough was tried
        ([(0.5, 100), (1.2, -1)], False, [100]),  # slower than the plan as it was
        ([(0.5, 100), None], False, [100]),  # nothing fits
        ([(math.inf, 0)], False, []),  # it cannot be recorded
    ],
)
def test_a_plan_is_recorded_where_that_is_faster_and_fits(
    measured: list[tuple[float, int] | None],
    is_recorded: bool,
    reserved: list[int],
    on_graph: _Planned,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    work, plain, as_it_is = on_graph
    results, asked = list(measured), list[int]()

    def times(_: Workload, rivals: list[Plan]) -> tuple[list[float], dict[int, int], list[str]]:
        (rival,) = rivals
        assert rival.program is not None
        if not rival.program.is_recorded:
            assert rival is as_it_is
            return [1.0], {}, []
        seconds, more = results.pop(0) or (math.inf, 0)
        return [seconds], {0: rival.budget_bytes + more}, []

    def search(*, engine: str, compile: bool, reserved: int) -> list[Plan]:
        asked.append(reserved)
        if results[0] is None:
            raise BudgetError("nothing fits")
        return [replace(as_it_is)]

    monkeypatch.setattr(tune, "_times", times)
    monkeypatch.setattr(Workload, "device", torch.device("cuda"))
    chosen = tune._recorded(work, plain, search, as_it_is)
    assert chosen.program is not None
    assert chosen.program.is_recorded == is_recorded
    assert asked == reserved
    if is_recorded:
        assert chosen.peak_bytes == as_it_is.budget_bytes - 1
        assert measured[-1] is not None
        assert chosen.seconds == pytest.approx(as_it_is.seconds + measured[-1][0] - 1)
    else:
        assert chosen is as_it_is


def test_plans_on_a_cpu_or_that_leave_no_gradients_are_not_recorded(
    on_graph: _Planned, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, plain, as_it_is = on_graph
    assert tune._recorded(work, plain, lambda **_: [], as_it_is) is as_it_is
    monkeypatch.setattr(Workload, "device", torch.device("cuda"))
    eager = replace(as_it_is, program=None)
    assert tune._recorded(work, plain, lambda **_: [], eager) is eager
    monkeypatch.setattr(Plan, "options", [Option("optimizer_in_backward", ("",))])
    assert tune._recorded(work, plain, lambda **_: [], as_it_is) is as_it_is
