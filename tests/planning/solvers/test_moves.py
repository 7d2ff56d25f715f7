"""Moves: freeing lowers the peak, and keeping again saves seconds within a target."""

from __future__ import annotations

from benchmarks.shapes import layers

from lowtide.planning.solvers.moves import filled, shrunk
from lowtide.planning.solvers.runs import RunTimeline
from lowtide.planning.solvers.segments import on_demand


def test_freeing_at_the_peak_lowers_it_for_seconds() -> None:
    plain = RunTimeline(layers(60), {})
    again, freed = shrunk(plain, int(0.9 * plain.peak_bytes), set())
    smaller = RunTimeline(plain.ops, again)
    assert freed
    assert smaller.peak_bytes < plain.peak_bytes
    assert smaller.seconds > 0
    assert shrunk(plain, int(0.9 * plain.peak_bytes), freed)[1].isdisjoint(freed)


def test_values_that_fit_are_kept_again() -> None:
    ops = layers(60)
    small = RunTimeline(ops, on_demand(ops, {op for op in range(ops.backward) if op % 10 == 9}))
    target = int(1.2 * small.peak_bytes)
    faster = RunTimeline(ops, filled(small, target))
    assert faster.peak_bytes <= target
    assert faster.seconds < small.seconds
