"""Two moves on runs: free values at the peak and recompute them later, or keep values that fit after all."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from functools import cached_property
from typing import NamedTuple

from lowtide.planning.solvers.runs import Again, Hold, RunTimeline, with_runs, without_runs

_SMALL = 0.02  # of a freed value: a source as small is kept for it


class _Freed(NamedTuple):
    """Runs that are added and removed to free values, their seconds and the bytes they free at the peak."""

    added: frozenset[tuple[int, int]]
    removed: frozenset[tuple[int, int]]
    seconds: float
    bytes: int

    @property
    def price(self) -> float:
        """Seconds for each byte."""
        return self.seconds / self.bytes if self.bytes > 0 else math.inf


def shrunk(
    timeline: RunTimeline, target: int, banned: set[tuple[int, int]], *, held_on: bool = True
) -> tuple[Again, set[tuple[int, int]]]:
    """Free the cheapest values at the peak until it would be at the target.

    Sources that are recomputed for them are ``held_on`` to where they run again anyway, or run again there too. Returns
    the runs, and the freed ops with the ops before which they run again.
    """
    return _AtPeak(timeline, banned, held_on=held_on).free(target)


class _AtPeak:
    """Values that live at the peak, unread there, and their recomputation right before their next reads."""

    def __init__(self, timeline: RunTimeline, banned: set[tuple[int, int]], *, held_on: bool) -> None:
        self.timeline, self.ops, self.banned, self.held_on = timeline, timeline.ops, banned, held_on
        self.place = int(timeline.live.argmax())
        self.again = timeline.again
        self.freed: dict[int, int] = {}  # ops freed in this move, and the op before which they run again
        self.chosen: set[tuple[int, int]] = set()  # the same for freed ops alone, without sources
        self.needed: dict[int, int] = {}  # ops that this move's runs read, and the first op before which they do

    def free(self, target: int) -> tuple[Again, set[tuple[int, int]]]:
        excess = int(self.timeline.live[self.place]) - target
        order = [(self.freeing(op, turn).price, -turn, op) for op, turn in self.candidates.items()]
        for price, _, op in sorted(order):
            if excess <= 0 or price == math.inf:
                break
            turn = min(self.candidates[op], self.needed.get(op, len(self.ops)))
            change = self.freeing(op, turn)
            if op in self.freed or change.bytes <= 0 or (op, turn) in self.banned:
                continue
            excess -= change.bytes
            self.chosen.add((op, turn))
            self.again = without_runs(with_runs(self.again, change.added), change.removed)
            for before, run in change.added:
                if (hold := self.ops.stores.get(run)) is not None:
                    if hold.readers:
                        self.freed[op] = len(self.ops)  # for good
                    continue
                self.freed[self.ops.op_of[run]] = before
                for source in self.ops.sources[run]:
                    self.needed[source] = min(before, self.needed.get(source, len(self.ops)))
        return self.again, self.chosen | set(self.freed.items())

    @cached_property
    def candidates(self) -> dict[int, int]:
        """Ops whose results may be freed, each with the op before which it has to run again."""
        timeline, ops, candidates = self.timeline, self.ops, dict[int, int]()
        now = timeline.before[self.place]
        blocked: set[int] = set()
        for value, born, dies in timeline.spans:
            if not born < self.place <= dies or not ops.bytes[value]:
                continue
            op = ops.maker[value]
            readers = timeline.is_read[value, born]
            following = bisect_left(readers, self.place)
            can_return = op in ops.repeatable or op in ops.holds_of
            if not can_return or value in ops.held or following == len(readers):
                blocked.add(op)
                continue
            turn = timeline.before[readers[following]]
            if turn <= now or turn < ops.backward or (op, turn) in self.banned:
                blocked.add(op)
            candidates[op] = min(turn, candidates.get(op, turn))
        return {op: turn for op, turn in candidates.items() if op not in blocked}

    def freeing(self, op: int, turn: int) -> _Freed:
        """The cheapest way to free an op's results at the peak and to have them again before a later op."""
        ways = [self._recomputing(op, turn)] if op in self.ops.repeatable else []
        for hold in self.ops.holds_of.get(op, ()):
            ways.append(self._coding(hold) if hold.readers else self._loading(hold, turn))
        return min(ways, key=lambda way: way.price)

    def _recomputing(self, op: int, turn: int) -> _Freed:
        """Runs of the op and of its missing sources."""
        added, removed = {(turn, op)}, set[tuple[int, int]]()
        seconds, gain = self.ops.seconds[op], self._bytes_at_peak(self.ops.makes[op])
        small = _SMALL * gain
        waiting, seen = list(self.ops.reads[op]), {op}
        while waiting:
            value = waiting.pop()
            source = self.ops.maker[value]
            if source in seen or self._is_available(value, turn):
                continue
            if self.ops.bytes[value] <= small:
                gain -= self.ops.bytes[value]  # it has to stay
                continue
            loads = [self._loading(hold, turn) for hold in self.ops.loads_of(value)]
            load = min(loads, key=lambda way: way.seconds, default=None)
            if load is not None and (source not in self.ops.repeatable or load.seconds < self.ops.seconds[source]):
                added |= load.added
                removed |= load.removed
                seconds += load.seconds
                gain += min(0, load.bytes - self._bytes_at_peak((value,)))
                continue
            if source not in self.ops.repeatable:
                gain -= self.ops.bytes[value]  # it has to stay
                continue
            seen.add(source)
            added.add((turn, source))
            later = self._later_run(source, turn)
            if later is None:
                seconds += self.ops.seconds[source]
            else:
                removed.add((later, source))
            waiting += self.ops.reads[source]
        return _Freed(frozenset(added), frozenset(removed), seconds, gain)

    def _coding(self, hold: Hold) -> _Freed:
        """Codes for all of backward, if none but their readers read the values from here on."""
        readers, gain = set(hold.readers), self._bytes_at_peak(hold.values) - self.ops.bytes[hold.stored]
        for value in hold.values:
            for born in self.timeline.spans_of[value][0]:
                reads = self.timeline.is_read[value, born]
                later = reads[bisect_left(reads, self.place) :]
                if not readers.issuperset(self.timeline.runs[place] for place in later):
                    gain = 0
        added = frozenset({(hold.turn, hold.store)})
        return _Freed(added, frozenset(), self.ops.seconds[hold.store], gain)

    def _loading(self, hold: Hold, turn: int) -> _Freed:
        """A load, and its store if it is missing."""
        added, seconds, gain = {(turn, hold.load)}, self.ops.seconds[hold.load], self._bytes_at_peak(hold.values)
        if hold.stored not in self._live_at_peak:
            gain -= self.ops.bytes[hold.stored]
        if hold.store not in self.again.get(hold.turn, ()):
            added.add((hold.turn, hold.store))
            seconds += self.ops.seconds[hold.store]
        later = self._later_run(hold.load, turn)
        if later is None:
            return _Freed(frozenset(added), frozenset(), seconds, gain)
        return _Freed(frozenset(added), frozenset({(later, hold.load)}), seconds - self.ops.seconds[hold.load], gain)

    def _bytes_at_peak(self, values: Iterable[int]) -> int:
        return sum(self.ops.bytes[value] for value in values if value in self._live_at_peak)

    @cached_property
    def _live_at_peak(self) -> frozenset[int]:
        return frozenset(value for value, born, dies in self.timeline.spans if born < self.place <= dies)

    def _is_available(self, value: int, turn: int) -> bool:
        """Tell whether a value lives right before an op, or is recomputed there."""
        op, again = self.ops.maker[value], self.again.get(turn, ())
        if op in again or (self.ops.holds and any(hold.load in again for hold in self.ops.loads_of(value))):
            return True
        if op in self.freed:
            return self.freed[op] <= turn
        births, deaths = self.timeline.spans_of.get(value, ((), ()))
        start = self.timeline.starts[turn]
        index = bisect_right(births, start - 1) - 1
        return index >= 0 and deaths[index] >= start

    def _later_run(self, op: int, turn: int) -> int | None:
        """The next op before which an op runs again, to be kept until then."""
        if op in self.freed and self.freed[op] > turn and op in self.again.get(self.freed[op], ()):
            return self.freed[op]
        turns = self.timeline.turns_of.get(op, ()) if self.held_on else ()
        index = bisect_right(turns, turn)
        return turns[index] if index < len(turns) else None


def filled(timeline: RunTimeline, target: int) -> Again:
    """Keep values in place of running their ops again, the most seconds for their bytes first, within the target."""
    live = timeline.live.copy()
    removed: list[tuple[int, int]] = []
    for gap in sorted(_gaps(timeline), key=lambda gap: (-gap.seconds / max(gap.bytes, 1), -gap.place)):
        starts = [start for start, _ in gap.values]
        if all(live[start : gap.place].max(initial=0) + gap.bytes <= target for start in starts):
            for start, size in gap.values:
                live[start : gap.place] += size
            removed.append((timeline.before[gap.place], timeline.runs[gap.place]))
    return without_runs(timeline.again, removed)


class _Gap(NamedTuple):
    """A run, and the values to keep in its place: from where, and their bytes."""

    place: int
    seconds: float  # of the run, and of runs that serve it alone
    bytes: int
    values: list[tuple[int, int]]


def _gaps(timeline: RunTimeline) -> list[_Gap]:
    ops, readers, latest = timeline.ops, timeline.is_read, list(range(len(timeline.ops.reads)))
    dies = {(value, born): last for value, born, last in timeline.spans}
    made_at: dict[int, int] = {}  # by value
    saved: dict[int, float] = {}
    gaps: list[_Gap] = []
    for place, (run, turn) in enumerate(zip(timeline.runs, timeline.before, strict=True)):
        op = ops.op_of[run]
        if run != turn and run not in ops.stores:
            values: list[tuple[int, int]] = []
            for value in ops.makes[run]:
                if readers[value, place]:
                    died = dies[value, made_at[value]]
                    values.append((died + (timeline.overwritten.get(died) != value), ops.bytes[value]))
            saved[place] = ops.seconds[run]
            for source in ops.sources[run]:
                run_before = latest[source]
                reads = [readers.get((value, run_before), []) for value in ops.makes[source]]
                if run_before in saved and all(places[-1:] in ([], [place]) and len(places) < 2 for places in reads):
                    saved[place] += saved[run_before]
            gaps.append(_Gap(place, saved[place], sum(size for _, size in values), values))
        latest[op] = place
        made_at.update((value, place) for value in ops.makes[run] if (value, place) in dies)
    return gaps
