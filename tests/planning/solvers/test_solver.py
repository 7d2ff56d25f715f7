"""Solvers are known by their registry alone: the programs of a new one are planned and run."""

from __future__ import annotations

import pytest
import torch

import lowtide
from lowtide.engines import apply, plan
from lowtide.errors import BudgetError
from lowtide.planning.programs.program import simulate
from lowtide.planning.programs.strategies import plain, without_cheap
from lowtide.planning.solvers.solver import SOLVERS, Problem, Solution, fastest_program, solutions
from lowtide.tracing.capture.loss import capture_joint

from ..steps import chain


class ToySolver:
    """Offers the program without cheap results, said to gain a second."""

    name = "toy"

    def solve(self, problem: Problem) -> list[Solution]:
        program = without_cheap(problem.joint)
        return [Solution("toy", "", -1.0, simulate(program).peak_bytes, lambda: program)]


def test_a_registered_solvers_program_is_planned_and_run() -> None:
    work = chain(3)
    before = lowtide.profile(work)
    with SOLVERS.register(ToySolver()):
        planned = plan(work, "97%", profile=before, engine="graph", tune=False)
    assert planned.program is not None
    assert (planned.program.solver, planned.seconds) == ("toy", before.seconds - 1.0)
    expected = work.compute_loss()
    with apply(planned, work) as step:  # the program is the plan's: nobody asks the solver again
        assert torch.equal(step.loss(work.batch), expected)
        assert step.profile().storage_peak_bytes == planned.storage_peak_bytes


def test_solutions_are_sorted_by_seconds_and_trade_them_for_bytes() -> None:
    joint = capture_joint(chain(3))
    programs = solutions(Problem(joint, lambda node: 1.0))
    seconds = [solution.seconds for solution in programs]
    assert seconds == sorted(seconds)
    assert seconds[0] == 0 < seconds[-1]
    assert programs[0].estimate_bytes > programs[-1].estimate_bytes


def test_the_fastest_program_fits_and_too_small_a_budget_is_refused_with_the_smallest() -> None:
    joint = capture_joint(chain(3))
    whole = simulate(plain(joint)).peak_bytes
    assert fastest_program(joint, whole).recomputed == 0
    half = fastest_program(joint, whole // 2)
    assert simulate(half).peak_bytes <= whole // 2
    smallest = fastest_program(joint, 1, or_smallest=True)
    with pytest.raises(BudgetError) as refused:
        fastest_program(joint, 1)
    assert refused.value.smallest_bytes == simulate(smallest).peak_bytes
