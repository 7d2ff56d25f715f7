"""First guesses: every value is recomputed at most once, and a few cuts already lower the peak."""

from __future__ import annotations

from collections import Counter

from benchmarks.shapes import layers

from lowtide.planning.solvers.runs import RunTimeline
from lowtide.planning.solvers.segments import on_demand, segmented


def test_segments_lower_the_peak_and_run_no_op_twice_again() -> None:
    ops = layers(200)
    guesses = [RunTimeline(ops, again) for again in segmented(ops)]
    for guess in guesses:
        runs = Counter(op for stage in guess.again.values() for op in stage)
        assert max(runs.values(), default=0) <= 1
    assert min(guess.peak_bytes for guess in guesses) < 0.4 * RunTimeline(ops, {}).peak_bytes


def test_nothing_runs_again_if_all_is_kept_and_all_that_backward_reads_if_nothing_is() -> None:
    ops = layers(60)
    assert on_demand(ops, set(range(ops.backward))) == {}
    again = {op for runs in on_demand(ops, set()).values() for op in runs}
    read = {source for op in range(ops.backward, len(ops)) for source in ops.sources[op]}
    assert again >= {op for op in read if op < ops.backward}
