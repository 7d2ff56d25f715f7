"""Runs that trade seconds for bytes: descend from several first guesses, then keep again what fits."""

from __future__ import annotations

import math
from collections.abc import Iterator

from lowtide.planning.solvers.moves import filled, shrunk
from lowtide.planning.solvers.runs import Again, Ops, RunTimeline, without_runs
from lowtide.planning.solvers.segments import segmented

_TARGETS = 36  # peaks at which runs are sought, from the smallest to the plain one
# Rounds of a descent: the share of the peak to reach, and whether recomputed sources are held on to their next readers.
_ATTEMPTS = ((0.96, True), (0.98, True), (0.98, False))
_PATIENCE = 4  # rounds that may fail to lower the peak
_GUESSES = 2  # segmentations that are descended from: the smallest
_STARTS = 2  # timelines that are filled for a target: the fastest, beside the one for the target before
_ROUNDS = 3  # of keeping again
_POLISHED = 20_000  # ops squared, times attempts to keep one value for others: small graphs are searched more
_MOST_POLISHED = 64  # attempts
_CLOSE = 0.995  # of a peak: not worth another program


def frontier(ops: Ops, *, targets: int = _TARGETS, guess: bool = True) -> list[RunTimeline]:
    """Timelines from the fastest to the smallest: each smaller one takes more seconds.

    Without a ``guess``, the search descends from the plain order alone.
    """
    plain = RunTimeline(ops, {})
    starts = (RunTimeline(ops, again) for again in segmented(ops)) if guess else ()
    guesses = sorted(starts, key=lambda guess: guess.peak_bytes)
    descents = [list(_descent(start)) for start in (plain, *guesses[:_GUESSES])]
    descents += [[guess] for guess in guesses[_GUESSES:]]
    smallest = min(timeline.peak_bytes for descent in descents for timeline in descent)
    best = [plain, *(timeline for descent in descents for timeline in descent)]
    before: RunTimeline | None = None
    for share in _shares(targets):
        target = smallest + int(share * (plain.peak_bytes - smallest))
        fit = [next((each for each in descent if each.peak_bytes <= target), None) for descent in descents]
        starts = sorted((each for each in (*fit, before) if each is not None), key=_cost)[:_STARTS]
        if before is not None and before not in starts:
            starts.append(before)
        before = _polished(min((_filled(start, target) for start in starts), key=_cost), target)
        best.append(before)
    return _undominated(best)


def _shares(targets: int) -> list[float]:
    """Peaks as shares of the way from the smallest to the plain one: closer where every byte is dear."""
    few = targets * 2 // 9
    many = targets - few
    return [*(0.16 * step / few for step in range(few)), *(0.16 + 0.84 * step / many for step in range(many))]


def _cost(timeline: RunTimeline) -> tuple[float, int]:
    return timeline.seconds, timeline.peak_bytes


def _undominated(timelines: list[RunTimeline]) -> list[RunTimeline]:
    """The fastest at each peak, the smallest, and none that is hardly smaller than a faster one."""
    smallest = min(timeline.peak_bytes for timeline in timelines)
    chosen: list[RunTimeline] = []
    for timeline in sorted(timelines, key=_cost):
        last = chosen[-1].peak_bytes if chosen else math.inf
        if timeline.peak_bytes < _CLOSE * last or timeline.peak_bytes == smallest < last:
            chosen.append(timeline)
    return chosen


def _descent(timeline: RunTimeline) -> Iterator[RunTimeline]:
    """Timelines with falling peaks, until nothing helps."""
    yield timeline
    banned: set[tuple[int, int]] = set()
    failed = 0
    while failed < _PATIENCE:
        freed: set[tuple[int, int]] = set()
        for step, held_on in _ATTEMPTS:
            again, freed = shrunk(timeline, int(timeline.peak_bytes * step), banned, held_on=held_on)
            if not freed:
                return
            following = RunTimeline(timeline.ops, again)
            if following.peak_bytes < timeline.peak_bytes:
                timeline, failed = following, 0
                yield timeline
                break
        else:
            failed += 1
            banned |= freed


def _filled(timeline: RunTimeline, target: int) -> RunTimeline:
    for _ in range(_ROUNDS):
        again: Again = filled(timeline, target)
        following = RunTimeline(timeline.ops, again)
        if following.peak_bytes > target or following.seconds >= timeline.seconds:
            return timeline
        timeline = following
    return timeline


def _polished(timeline: RunTimeline, target: int) -> RunTimeline:
    """Keep one value and free others for it, as long as that saves seconds."""
    tried: set[tuple[int, int]] = set()
    for _ in range(min(_MOST_POLISHED, _POLISHED // len(timeline.ops) ** 2)):
        again = ((turn, run) for turn, runs in timeline.again.items() for run in runs)
        runs = [run for run in again if run not in tried and run[1] not in timeline.ops.stores]
        if not runs:
            break
        run = max(runs, key=lambda run: (timeline.ops.seconds[run[1]], run))
        tried.add(run)
        other = _repaired(RunTimeline(timeline.ops, without_runs(timeline.again, [run])), target, run)
        if other.peak_bytes <= target:
            timeline = min(timeline, _filled(other, target), key=_cost)
    return timeline


def _repaired(timeline: RunTimeline, target: int, kept: tuple[int, int]) -> RunTimeline:
    """Free values other than one, until the peak is at the target."""
    turn, op = kept
    for _ in range(_PATIENCE):
        if timeline.peak_bytes <= target:
            break
        again, freed = shrunk(timeline, target, {(timeline.ops.op_of[op], turn)})
        if not freed:
            break
        timeline = RunTimeline(timeline.ops, again)
    return timeline
