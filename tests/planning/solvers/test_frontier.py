"""The frontier: against every choice on small graphs, and how it grows."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
from benchmarks.shapes import layers

from lowtide.planning.solvers.frontier import frontier

from ...soak import SOAK, count
from .exhaustive import best_peak, best_seconds, random_ops


@pytest.mark.parametrize("seed", range(count(6, soak=200)))
def test_small_graphs_are_solved_as_by_trying_all(seed: int) -> None:
    ops = random_ops(seed)
    timelines = frontier(ops)
    smallest = best_peak(ops)
    assert timelines[-1].peak_bytes == smallest
    for budget in range(smallest, timelines[0].peak_bytes, 2):
        fastest = next(timeline for timeline in timelines if timeline.peak_bytes <= budget)
        assert fastest.seconds == best_seconds(ops, budget)


def test_smaller_timelines_take_longer() -> None:
    timelines = frontier(layers(150))
    assert timelines[0].seconds == 0
    assert timelines[-1].peak_bytes < 0.25 * timelines[0].peak_bytes
    for timeline, smaller in pairwise(timelines):
        assert smaller.peak_bytes < timeline.peak_bytes
        assert smaller.seconds > timeline.seconds


@pytest.mark.parametrize("more", [4, *([10, 25, 100] if SOAK else [])])
def test_time_grows_about_linearly(more: int) -> None:
    seconds: list[float] = []
    for size in (100, 100 * more):
        start = time.process_time()
        frontier(layers(size))
        seconds.append(time.process_time() - start)
    assert seconds[1] < 3 * more * seconds[0]
