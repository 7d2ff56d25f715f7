"""Runs in order: where values live, what is dropped, and the bytes meanwhile."""

from __future__ import annotations

from lowtide.planning.solvers.runs import Ops, RunTimeline, with_runs, without_runs

# x -> a -> b, and the backward of each: b's reads b, a's reads a.
CHAIN = Ops(
    reads=((), (0,), (1,), (2,), (3, 1), (4, 0)),
    makes=((0,), (1,), (2,), (3,), (4,), (5,)),
    bytes=(4, 8, 2, 2, 8, 4),
    seconds=(1.0, 2.0, 4.0, 1.0, 1.0, 1.0),
    backward=3,
    repeatable=frozenset({0, 1, 2}),
    held=frozenset({5}),
)


def test_bytes_of_the_plain_order() -> None:
    plain = RunTimeline(CHAIN, {})
    assert plain.live.tolist() == [4, 12, 14, 16, 22, 16]
    assert (plain.peak_bytes, plain.seconds) == (22, 0.0)


def test_a_freed_value_lives_again_from_its_run() -> None:
    timeline = RunTimeline(CHAIN, {4: frozenset({1})})
    assert timeline.runs == [0, 1, 2, 3, 1, 4, 5]
    assert timeline.live.tolist() == [4, 12, 14, 8, 14, 22, 16]
    assert timeline.seconds == 2.0


def test_runs_whose_results_nobody_reads_are_dropped_with_their_sources() -> None:
    timeline = RunTimeline(CHAIN, {5: frozenset({1, 2})})
    assert timeline.again == {}
    assert timeline.seconds == 0.0


def test_a_result_takes_the_place_of_a_dying_value() -> None:
    ops = Ops(((), (0,), (1,)), ((0,), (1,), (2,)), (4, 4, 4), (0.0,) * 3, 2, frozenset(), over=((), (0,), (1,)))
    assert RunTimeline(ops, {}).live.tolist() == [4, 4, 4]


def test_added_runs_are_removed_again() -> None:
    again = with_runs({4: frozenset({1})}, [(4, 0), (5, 0)])
    assert again == {4: frozenset({0, 1}), 5: frozenset({0})}
    assert without_runs(again, [(4, 0), (5, 0)]) == {4: frozenset({1}), 5: frozenset()}
