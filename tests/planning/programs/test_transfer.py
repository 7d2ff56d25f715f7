"""A program on the graph of another batch: the same bits, with that graph's bytes; or none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lowtide.engines.graph import planned_loss
from lowtide.errors import PlanError
from lowtide.planning.programs.program import Program, simulate
from lowtide.planning.programs.transfer import check_runs_on, transferred
from lowtide.planning.solvers.solver import Problem, fastest_program, solutions
from lowtide.tracing.capture.joint import Joint
from lowtide.tracing.capture.loss import capture_joint
from tests.refusals import refused

from ...engines.counting import assert_equal, executed_peak, plain_results, results
from ...engines.planned import awkward


@pytest.fixture(scope="module")
def programs() -> list[Program]:
    return [solution.program for solution in solutions(Problem(capture_joint(awkward()), lambda node: 1.0))]


def test_a_program_runs_on_a_smaller_batch_with_that_batchs_bytes(programs: list[Program]) -> None:
    work = awkward()
    work = replace(work, batch=work.batch[:63].clone())
    peaks: list[int] = []

    def planner(joint: Joint) -> Program:
        program = transferred(programs[len(programs) // 2], joint)
        assert program is not None
        peaks.append(simulate(program).peak_bytes)
        return program

    expected = plain_results(work)
    assert_equal(results(work, planned_loss(work, planner)), expected)
    assert executed_peak(work, planned_loss(work, planner)) == peaks[-1]
    assert peaks[-1] < simulate(programs[len(programs) // 2]).peak_bytes


def test_a_transferred_program_takes_what_a_new_one_would(programs: list[Program]) -> None:
    work = awkward()
    joint = capture_joint(replace(work, batch=work.batch[:32].clone()))
    anew = [solution.program for solution in solutions(Problem(joint, lambda node: 1.0))]
    moved = transferred(programs[0], joint)
    assert moved is not None
    assert simulate(moved).live_bytes == simulate(anew[0]).live_bytes


def test_a_graph_of_other_ops_takes_no_program_of_this_one(programs: list[Program]) -> None:
    other = capture_joint(awkward(tied=False))
    assert transferred(programs[0], other) is None
    with refused("program", "graph", kind=PlanError):
        check_runs_on(programs[0], other)
    check_runs_on(fastest_program(other, 2**40), other)
