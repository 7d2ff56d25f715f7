"""Codes among the choices of the graph solver, and of plans."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch.nn.functional as F

from lowtide import Workload, zoo
from lowtide.engines import plan, verify
from lowtide.planning import Plan
from lowtide.planning.programs.codes import codes_of
from lowtide.planning.programs.program import Kind
from lowtide.planning.programs.program_profile import Forecast
from lowtide.planning.solvers.encode import with_codes
from lowtide.planning.solvers.frontier import frontier
from lowtide.planning.solvers.graph import GraphSolver
from lowtide.planning.solvers.runs import RunTimeline
from lowtide.planning.solvers.solver import Problem, Solution
from lowtide.profiling import profile
from lowtide.techniques.technique import Fidelity
from lowtide.tracing.capture.joint import Joint, bytes_of
from lowtide.tracing.capture.loss import capture_joint

from ..programs.test_codes import Function, step


def solutions(joint: Joint, *, codes: bool = True) -> list[Solution]:
    return GraphSolver().solve(Problem(joint, lambda node: 1.0 + bytes_of(node), codes=codes))


@pytest.mark.parametrize("make", [lambda: step(F.relu), lambda: step(F.gelu), lambda: zoo.small("gpt2")])
def test_no_budget_is_slower_than_without_codes(make: Callable[[], Workload]) -> None:
    joint = capture_joint(make())
    offered = solutions(joint)
    for plain in solutions(joint, codes=False):
        best = min(each.seconds for each in offered if each.estimate_bytes <= plain.estimate_bytes)
        assert best <= plain.seconds
    exact = [each for each in offered if each.fidelity is Fidelity.BITWISE]
    for plain in solutions(joint, codes=False):  # also where nothing else is allowed
        assert min(each.seconds for each in exact if each.estimate_bytes <= plain.estimate_bytes) <= plain.seconds


def test_a_timeline_with_codes_lives_on_fewer_bytes_for_the_seconds_of_taking_them() -> None:
    joint = capture_joint(step(F.gelu))
    problem = Problem(joint, lambda node: 1.0 + bytes_of(node))
    coded = with_codes(problem.kernels, list(codes_of(joint).values()), problem.seconds, problem.workspace)
    timeline = RunTimeline(coded.ops, {hold.turn: frozenset({hold.store}) for hold in coded.ops.holds})
    assert len(coded.used(timeline)) == 3
    size = 100 * 32 * 3 // 8
    assert timeline.seconds == 3 * (1 + size)
    assert timeline.peak_bytes < frontier(problem.kernels.ops)[0].peak_bytes - 2 * (100 * 32 * 4 - size)


@pytest.fixture
def by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ops take seconds for the bytes of their results, on any machine."""
    monkeypatch.setattr(Forecast, "seconds", lambda _, node: 1e-12 * bytes_of(node))


def planned(activation: Function, share: float, allow: str | list[str] = ()) -> tuple[Plan, int]:
    """A plan for a share of the plain peak above what stays, verified; and how many values are held in codes."""
    work = step(activation, rows=4000)
    plain = profile(work)
    budget = plain.graph.static_bytes + int(share * (plain.peak_bytes - plain.graph.static_bytes))
    made = plan(work, budget, engine="graph", tune=False, profile=plain, allow=allow)
    assert made.program is not None
    assert made.peak_bytes <= budget
    assert Plan.from_json(made.to_json()) == made
    checked = verify(work, made)
    assert checked.ok, str(checked)
    return made, sum(each.kind is Kind.ENCODE for each in made.program.instructions.forward)


@pytest.mark.usefixtures("by_bytes")
def test_plans_take_codes_of_gates_by_default() -> None:
    made, coded = planned(F.relu, 0.75)
    assert coded
    assert made.fidelity is Fidelity.BITWISE
    assert "few-bit codes stand for" in made.explain()


@pytest.mark.usefixtures("by_bytes")
@pytest.mark.parametrize("allow", ["approximate", ["fewbit"]])
def test_plans_take_codes_of_curves_where_allowed(allow: str | list[str]) -> None:
    strict, coded = planned(F.gelu, 0.75)
    assert not coded
    assert strict.fidelity is Fidelity.BITWISE
    loose, coded = planned(F.gelu, 0.75, allow)
    assert coded
    assert loose.fidelity is Fidelity.APPROXIMATE
    assert loose.program is not None
    assert strict.program is not None
    assert loose.program.seconds < strict.program.seconds
    assert 0 < loose.program.bound < 0.5
    assert f"errs by at most {loose.program.bound:.0%}" in loose.explain()
