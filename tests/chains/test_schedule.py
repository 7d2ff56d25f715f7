"""Schedules read and print as in the document; the simulator counts every byte and refuses what cannot run."""

from __future__ import annotations

import pytest

from lowtide.chains import Action, Chain, Operation, Schedule, simulate
from lowtide.errors import PlanError
from tests.refusals import refused


def test_schedules_read_and_print_as_in_the_document():
    text = "F1c, F2n, F3e, B3, F1e, F2e, B2, B1"
    schedule = Schedule.parse(text)
    assert str(schedule) == text
    assert schedule.operations[1] == Operation(Action.NOTHING, 1)
    assert schedule.runs == (2, 2, 1)
    for wrong in ("F1x", "B1e", "F0e", "", "Loss"):
        with pytest.raises(PlanError):
            Schedule.parse(wrong)


def test_the_simulator_counts_as_by_hand():
    # value 0: 2 B, value 1: 3 B, value 2: 5 B; stage 1 saves 7 B, stage 2 saves 11 B; gradients as their values.
    chain = Chain([1, 10], [100, 1000], [2, 3, 5], [7, 11], [13, 17], [19, 23])
    result = simulate(chain, Schedule.parse("F1c, F2e, B2, F1e, B1"))
    during = [2 + 3 + 13, 2 + 3 + 11 + 17, 2 + 3 + 11 + (5 + 3) + 23, 2 + 3 + 7 + 13, 2 + 7 + (3 + 2) + 19]
    assert result.during_bytes.tolist() == during
    assert result.live_bytes.tolist() == [2 + 3, 2 + 3 + 11, 2 + 3, 2 + 3 + 7, 2 + 2]
    assert result.peak_bytes == 47
    assert result.seconds == 1 + 10 + 1000 + 1 + 100


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("F2e", "F2e cannot run as operation 1: its input, the output of stage 1"),
        ("F1c, F2n, F2e", "F2e cannot run as operation 3: its input"),
        ("F1c, F1e", "F1e cannot run as operation 2: its result"),
        ("F1e, F2e, F3e, B2", "gradient is that of stage 3"),
        ("F1c, F2c, F3e, B3, B2", "B2 cannot run as operation 5: its saved values"),
        ("F1n", "F1n cannot run as operation 1: its input"),
        ("F1e, F2n", "F2n cannot run as operation 2: its input"),
        ("F1e, F2e, F3e, B3, B2", "backward of stage 1"),
        ("F1e, F2e, F3e, F4e", "3 stages"),
        ("F1c, F2e", "backward of stage 3"),
    ],
)
def test_the_simulator_refuses_operations_that_cannot_run(text, wrong):
    with refused(wrong, kind=PlanError):
        simulate(Chain.uniform(3), Schedule.parse(text))
