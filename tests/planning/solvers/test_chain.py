"""The chain solver: programs within a budget to the byte, and never more recomputation for more bytes."""

from __future__ import annotations

import contextlib
from itertools import product

import pytest

from lowtide import zoo
from lowtide.engines import graph
from lowtide.errors import BudgetError
from lowtide.planning.programs.program import Program, simulate
from lowtide.planning.solvers.solver import fastest_program
from lowtide.tracing.capture.joint import Joint

from ...engines.counting import assert_equal, executed_peak, plain_results, results
from ...soak import SOAK

MODELS = ["lenet", "gpt2", "resnet18", "wrn28-2", "densenet121", "unet", "roberta-base"]


SHARES = [0.9, 0.7, 0.5, 0.35]


AT_SHARES = [("lenet", 0.9), ("lenet", 0.35), ("gpt2", 0.5)]


@pytest.mark.parametrize(("name", "share"), list(product(MODELS, SHARES)) if SOAK else AT_SHARES)
def test_a_budget_is_kept_to_the_byte_or_refused_with_the_smallest(name: str, share: float) -> None:
    work = zoo.small(name)
    promised: list[tuple[int, Program]] = []

    def planner(joint: Joint) -> Program:
        budget = int(share * simulate(fastest_program(joint, 2**60)).peak_bytes)
        try:
            program = fastest_program(joint, budget)
        except BudgetError as error:
            budget = error.smallest_bytes or 0
            program = fastest_program(joint, budget)
        promised.append((budget, program))
        return program

    loss = graph.planned_loss(work, planner)
    plain = plain_results(work)
    assert_equal(results(work, loss), plain)
    (budget, program), *_ = promised
    assert simulate(program).peak_bytes == executed_peak(work, loss) <= budget


def test_a_larger_budget_never_runs_more_again() -> None:
    seen: list[list[int]] = []

    def planner(joint: Joint) -> Program:
        whole = simulate(fastest_program(joint, 2**60)).peak_bytes
        programs = []
        for share in (1.0, 0.95, 0.9, 0.8, 0.7, 0.6):
            with contextlib.suppress(BudgetError):
                programs.append(fastest_program(joint, int(share * whole)))
        seen.append([program.recomputed for program in programs])
        return programs[-1]

    work = zoo.small("lenet")
    graph.planned_loss(work, planner)(work.batch)
    assert seen[0][0] == 0
    assert seen[0] == sorted(seen[0])
