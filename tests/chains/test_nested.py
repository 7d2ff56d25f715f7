"""Schedules are nested checkpoints, and recomputed segments leave their tails out."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.chains import Chain, OptimalSchedules, Schedule, explain, keep_all, nested, recursive, sqrt
from lowtide.errors import PlanError

from ..soak import count
from .samples import again, chains, flat, peak, unnested, without_light


@given(chain=chains(), share=st.floats(0, 1))
@settings(max_examples=count(50, soak=200), deadline=None)
def test_every_schedule_is_its_nested_checkpoints(chain: Chain, share: float):
    chain = without_light(chain)
    plans = OptimalSchedules(chain, slots=60)
    most = peak(chain, keep_all(chain))
    budget = plans.smallest_bytes + int(share * (most - plans.smallest_bytes))
    for schedule in (plans.schedule(budget), keep_all(chain), sqrt(chain), recursive(chain)):
        tree = nested(schedule)
        assert flat(tree) == list(range(chain.stages))
        assert tuple(unnested(tree)) == schedule.operations


@pytest.mark.parametrize(
    "text",
    [
        "F1e, F2e, B2",
        "F1e, F2e, B2, B1, B1",
        "F1l, F2e, B2, B1",
        "F1c, F2e, B2, F1n, F1e, B1",
        "F1e, F1e, B1",
        "F1c, F2c, F3e, B3, F1c, F2e, B2, F1e, B1",  # the second checkpoint is freed and recomputed
    ],
)
def test_a_schedule_that_does_not_nest_is_refused(text: str):
    with pytest.raises(PlanError):
        nested(Schedule.parse(text))


def test_a_tail_is_left_out_by_the_last_stage_of_a_recomputed_segment_alone():
    chain = Chain([4, 4, 4], [0, 0, 0], [1] * 4, [1] * 3, tail_seconds=[1, 2, 3])
    assert again(chain, Schedule.parse("F1c, F2n, F3e, B3, F1e, F2e, B2, B1")) == 4 + 4 - 2
    assert again(chain, Schedule.parse("F1c, F2c, F3e, B3, F2e, B2, F1e, B1")) == 4 - 2 + 4 - 1
    assert again(chain, keep_all(chain)) == 0
    choices = explain(chain, Schedule.parse("F1c, F2n, F3e, B3, F1e, F2e, B2, B1"))
    assert [choice.seconds_again for choice in choices] == [4, 2, 0]
