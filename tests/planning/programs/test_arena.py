"""Memory is never given twice; an arena holds what lives; no strategy takes more than the one before."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings

from lowtide.planning.programs.arena import Placement, arena, pool, share
from lowtide.planning.programs.liveness import Life, Order, lives, lives_in_place, peak_bytes
from tests.planning.orders import EXP, many_lives, orders


def overlaps(found: Sequence[Life], placement: Placement) -> bool:
    """Whether two lives have a moment and a byte in common, or one lies outside."""
    for i, (life, offset) in enumerate(zip(found, placement.offsets, strict=True)):
        if life.bytes and not 0 <= offset <= placement.bytes - life.bytes:
            return True
        for other, there in list(zip(found, placement.offsets, strict=True))[:i]:
            in_time = life.born <= other.dies and other.born <= life.dies
            if in_time and offset < there + other.bytes and there < offset + life.bytes and life.bytes and other.bytes:
                return True
    return False


@pytest.mark.parametrize("place", [arena, pool])
@given(found=many_lives())
@settings(deadline=None)
def test_no_two_values_that_live_at_once_overlap(place: Callable[[list[Life]], Placement], found: list[Life]) -> None:
    placed = place(found)
    assert not overlaps(found, placed)
    assert peak_bytes(found) <= placed.bytes <= sum(life.bytes for life in found)


@given(many_lives())
@settings(deadline=None)
def test_a_tag_has_one_life_at_a_time_and_is_large_enough(found: list[Life]) -> None:
    shared = share(found)
    buffers: dict[int, list[Life]] = {}
    for life, tag in zip(found, shared.tags, strict=True):
        assert (tag < 0) == (life.bytes == 0)
        buffers.setdefault(tag, []).append(life)
    buffers.pop(-1, None)
    for tag, mine in buffers.items():
        assert shared.sizes[tag] == max(life.bytes for life in mine)
        mine.sort()
        assert all(one.dies < other.born for one, other in pairwise(mine))
    assert peak_bytes(found) <= shared.bytes <= sum(life.bytes for life in found)


@given(orders())
@settings(deadline=None)
def test_no_strategy_takes_more_than_the_one_before(order: Order) -> None:
    apart, merged = lives(order), lives_in_place(order)
    none, in_place = sum(order.bytes), sum(life.bytes for life in merged)
    sharing = arena(apart).bytes
    both = min(arena(merged).bytes, sharing)
    assert in_place <= none
    assert sharing <= none
    assert both <= min(in_place, sharing)


def test_the_courses_example_in_each_way() -> None:
    assert arena(lives(EXP)) == Placement((0, 4, 0), 8)
    assert share(lives(EXP)).tags == (0, 1, 0)
    assert pool(lives(EXP)).bytes == 8
    assert arena(lives_in_place(EXP)).bytes == 4


def test_best_fit_takes_the_smallest_gap() -> None:
    # Two gaps, of 4 and of 2 bytes, when the last comes: it fits in the smaller one.
    found = [Life(0, 9, 8), Life(0, 2, 4), Life(0, 9, 7), Life(0, 2, 2), Life(0, 9, 6), Life(3, 9, 2)]
    placed = pool(found)
    assert placed.offsets == (0, 8, 12, 19, 21, 19)
    assert arena(found).bytes == peak_bytes(found) == 27


def test_static_offsets_know_the_future_that_a_pool_does_not() -> None:
    # The pool has 2 free bytes when 3 are wanted; the arena leaves room for them from the start.
    found = [Life(0, 1, 2), Life(1, 2, 1), Life(2, 3, 3)]
    assert pool(found).bytes == 6
    assert arena(found).bytes == peak_bytes(found) == 4


def test_a_pool_joins_what_is_free_and_grows_its_last_block() -> None:
    joined = [Life(0, 1, 2), Life(0, 1, 2), Life(0, 5, 1), Life(2, 3, 4)]
    assert pool(joined).bytes == 5
    grown = [Life(0, 5, 1), Life(0, 1, 2), Life(2, 3, 4)]
    assert pool(grown).bytes == 5


def test_nothing_takes_nothing() -> None:
    assert arena([]) == pool([]) == Placement((), 0)
    assert share([]).bytes == 0
    assert peak_bytes([]) == 0


@pytest.mark.parametrize("length", [20, 4_000])
def test_many_lives_are_placed_in_seconds(length: int) -> None:
    """4,000 values of a step: most are short, one in some lives long."""
    count = 4_000
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 1000, count).tolist()
    kept = max(1, length // 20)
    found = [Life(i, min(i + (i % kept == 0) * length + 2, count), size) for i, size in enumerate(sizes)]
    start = time.perf_counter()
    assert arena(found).bytes >= peak_bytes(found)
    assert time.perf_counter() - start < 10
