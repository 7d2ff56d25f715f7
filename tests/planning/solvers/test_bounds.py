"""LowerBounds hold: no choice of runs on small graphs is smaller or faster."""

from __future__ import annotations

import pytest

from lowtide.planning.solvers.bounds import LowerBounds
from lowtide.planning.solvers.runs import RunTimeline

from ...soak import count
from .exhaustive import best_peak, best_seconds, random_ops


@pytest.mark.parametrize("seed", range(count(4, soak=60)))
def test_no_choice_beats_a_bound(seed: int) -> None:
    ops = random_ops(seed)
    plain = RunTimeline(ops, {})
    bounds, smallest = LowerBounds(plain), best_peak(ops)
    assert bounds.peak_bytes <= smallest
    assert bounds.seconds(bounds.peak_bytes - 1) == float("inf")
    assert bounds.seconds(plain.peak_bytes) == 0.0
    for budget in range(smallest, plain.peak_bytes, 3):
        best = best_seconds(ops, budget)
        assert best is not None
        assert bounds.seconds(budget) <= best + 1e-9
