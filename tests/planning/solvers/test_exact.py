"""The integer program finds what trying all choices finds."""

from __future__ import annotations

import pytest

from lowtide.planning.solvers.exact import fastest
from lowtide.planning.solvers.runs import RunTimeline

from ...soak import count
from .exhaustive import best_peak, best_seconds, random_ops


@pytest.mark.parametrize("seed", range(3, 3 + count(2, soak=40)))
def test_the_fewest_seconds_within_a_budget(seed: int) -> None:
    ops = random_ops(seed)
    smallest = best_peak(ops)
    assert fastest(ops, smallest - 1) is None
    for budget in range(smallest, RunTimeline(ops, {}).peak_bytes, 3):
        again = fastest(ops, budget)
        assert again is not None
        timeline = RunTimeline(ops, again)
        assert timeline.peak_bytes <= budget
        assert timeline.seconds == best_seconds(ops, budget)
