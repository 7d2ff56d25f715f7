"""Programs: simulated, printed, and refused where an instruction cannot run."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest

from lowtide.errors import PlanError
from lowtide.planning.programs.liveness import lives, lives_in_place, order_of, peak_bytes
from lowtide.planning.programs.program import Kind, Program, Value, check_program, simulate
from lowtide.planning.programs.strategies import (
    plain,
    sqrt_without_cheap,
    without_cheap,
)
from lowtide.tracing.capture.loss import capture_joint

from ...engines.counting import Planner
from .test_strategies import STEPS


def test_a_program_that_lost_an_instruction_is_refused(programs: list[Program]) -> None:
    program = programs[1]
    read = {value for each in program.backward for value in each.reads}
    computed = [
        place for place, each in enumerate(program.backward) if each.kind is Kind.RECOMPUTE and each.value in read
    ]
    for place in random.Random(0).sample(computed, 5):
        shorter = replace(program, backward=(*program.backward[:place], *program.backward[place + 1 :]))
        with pytest.raises(PlanError):
            check_program(shorter)


def test_a_program_that_keeps_too_little_or_unknown_values_is_refused(programs: list[Program]) -> None:
    for kept in ((), (*programs[0].kept, Value("gelu", run=3))):
        with pytest.raises(PlanError):
            check_program(replace(programs[0], kept=kept))


@pytest.mark.parametrize("name", ["mlp", "lstm"])
def test_the_programs_simulator_counts_between_in_place_and_sharing(name: str) -> None:
    """The engine writes over an op's first input alone, so it may take more than in place, never more than sharing."""
    joint = capture_joint(STEPS[name]())
    tangents = sum(node.meta["val"].nbytes for node in joint.tangents)
    for planner in (plain, without_cheap, sqrt_without_cheap):
        program = planner(joint)
        order = order_of(joint, program)
        simulated = simulate(program).peak_bytes - tangents
        assert peak_bytes(lives_in_place(order)) <= simulated <= peak_bytes(lives(order))


def test_a_program_prints_what_runs_again(smallest: Planner) -> None:
    text = str(smallest.programs[0])
    assert re.search(r"recompute native_dropout\w* \(run \d\) from", text)
    assert ".state" in text
    assert "go to backward --" in text
    assert any(i.kind is Kind.FREE for i in smallest.programs[0].backward)


def test_copies_that_go_astray_are_refused(programs: list[Program]) -> None:
    program = programs[2]
    fetches = [place for place, each in enumerate(program.backward) if each.kind is Kind.FETCH]
    first, second = fetches[:2]
    crossed = list(program.backward)
    crossed[first] = replace(crossed[first], reads=crossed[second].reads)
    with pytest.raises(PlanError):
        check_program(replace(program, backward=tuple(crossed)))
    value = program.backward[first].value
    with pytest.raises(PlanError):
        check_program(replace(program, bytes={**program.bytes, value: program.bytes[value] + 1}))
