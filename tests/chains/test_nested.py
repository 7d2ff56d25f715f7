"""Schedules are nested checkpoints; segments end where they may, and tails are left out."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.chains import (
    Action,
    Chain,
    Operation,
    OptimalSchedules,
    Schedule,
    Tree,
    explain,
    keep_all,
    nested,
    recursive,
    sqrt,
)
from lowtide.errors import LowtideError, PlanError

from .samples import again, chains, peak, random_chain, without_light


def unnested(tree: Tree) -> list[Operation]:
    """The operations of nested checkpoints, written down by what a checkpoint does."""
    forward: list[Operation] = []
    backward: list[Operation] = []
    for node in tree:
        if isinstance(node, int):
            forward.append(Operation(Action.EVERYTHING, node))
            backward = [Operation(Action.BACKWARD, node), *backward]
        else:
            first, *others = flat(node)
            forward += [
                Operation(Action.CHECKPOINT, first),
                *(Operation(Action.NOTHING, stage) for stage in others),
            ]
            backward = [*unnested(node), *backward]
    return [*forward, *backward]


def flat(node: int | Tree) -> list[int]:
    return [node] if isinstance(node, int) else [stage for child in node for stage in flat(child)]


def trees(first: int, last: int, ends: list[int]) -> list[Tree]:
    """All ways to run stages ``first`` to ``last`` with segments that end where they may."""
    if first == last:
        return [(first,)]
    found = [(first, *rest) for rest in trees(first + 1, last, ends)]
    for at in range(first + 1, min(last, ends[first]) + 1):
        found += [(inner, *rest) for inner in trees(first, at - 1, ends) for rest in trees(at, last, ends)]
    return found


@given(chain=chains(), share=st.floats(0, 1))
@settings(max_examples=100, deadline=None)
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
        "F1c, F2c, F3e, B3, F1c, F2e, B2, F1e, B1",  # the second checkpoint is let go and made again
    ],
)
def test_a_schedule_that_does_not_nest_is_refused(text: str):
    with pytest.raises(PlanError, match="does not nest"):
        nested(Schedule.parse(text))


def test_segments_end_where_they_may_and_tails_are_left_out_and_the_rest_is_the_best():
    rng = random.Random(7)
    for _ in range(40):
        stages = rng.randint(2, 6)
        small = without_light(random_chain(rng, stages))
        tails = [rng.randint(0, int(seconds)) for seconds in small.forward_seconds]
        chain = replace(small, tail_seconds=tails, gradient_bytes=small.value_bytes)
        ends = [rng.randint(stage, stages) for stage in range(stages)]
        known = [Schedule(tuple(unnested(tree))) for tree in trees(0, stages - 1, ends)]
        plans = OptimalSchedules(chain, segment_ends=ends)
        assert plans.smallest_bytes == min(peak(chain, schedule) for schedule in known)
        for budget in range(plans.smallest_bytes, peak(chain, keep_all(chain)) + 1):
            schedule = plans.schedule(budget)
            assert schedule in known
            assert again(chain, schedule) == min(again(chain, s) for s in known if peak(chain, s) <= budget)
        assert recursive(chain, ends) in known


def test_a_tail_is_left_out_by_the_last_stage_that_runs_again_and_by_no_other():
    chain = Chain([4, 4, 4], [0, 0, 0], [1] * 4, [1] * 3, tail_seconds=[1, 2, 3])
    assert again(chain, Schedule.parse("F1c, F2n, F3e, B3, F1e, F2e, B2, B1")) == 4 + 4 - 2
    assert again(chain, Schedule.parse("F1c, F2c, F3e, B3, F2e, B2, F1e, B1")) == 4 - 2 + 4 - 1
    assert again(chain, keep_all(chain)) == 0
    assert [
        choice.seconds_again for choice in explain(chain, Schedule.parse("F1c, F2n, F3e, B3, F1e, F2e, B2, B1"))
    ] == [
        4,
        2,
        0,
    ]


@pytest.mark.parametrize("ends", [[1], [0, 0], [2, 2, 2]])
def test_ends_of_segments_that_make_no_sense_are_refused(ends: list[int]):
    with pytest.raises(LowtideError, match="segment_ends of a chain of 2 stages"):
        OptimalSchedules(Chain.uniform(2), segment_ends=ends)
