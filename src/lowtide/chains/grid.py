"""Rotor's dynamic programme over a chain's stages and memory (Beaumont et al., 2019), on a grid of slots.

With E(s, t, m) the seconds of running stages again while stages s to t go forward and backward in m bytes beyond
the input of s, f forward seconds, r their tail, l the seconds of what is cheap, ã the bytes without that, and a, ā,
``keeping``, ``lightly``, ``passed`` and ``waiting`` as in ``Chain`` and ``Needs``:

    E(s, s, m) = 0                                                   if m >= keeping(s, s)
                 l_s                                                 or else if m >= lightly(s, s)
    E(s, t, m) = min( E(s + 1, t, m - ā_s)                           if m >= keeping(s, t): keep everything of s
                      l_s + E(s + 1, t, m - ã_s)                     if m >= lightly(s, t): keep s lightly
                      min over s < j <= t of                         if m >= waiting(t) + passed(s, j - 1): keep a_s,
                        f_s + … + f_{j-1} - r_{j-1} + E(j, t, m - a_j) + E(s, j - 1, m) )    go on to j, and come back

and infinity otherwise. Where segments may only end so far, j goes so far.
"""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

from lowtide.chains.needs import Needs
from lowtide.chains.schedule import Action, Schedule, Way, simulate, unroll


class Grid:
    """E for all parts of a chain, at about ``slots`` points of memory up to ``top`` bytes.

    Point i stands for ``i * slot + offset[s]`` bytes in the parts that start with stage s. The offsets are such that
    keeping everything of a stage leads from one point right to another: only checkpoints and what is kept lightly are
    rounded, so that what is left after one is the next point below. With fewer bytes than slots a slot is a byte, and
    all is exact.
    """

    def __init__(self, needs: Needs, top: int, slots: int) -> None:
        self.needs = needs
        self.slot = slot = max(1, -(-top // slots))
        self.points = top // slot + 1
        # Forward seconds before each stage, as a share of a power of two: float32 has whole seconds exactly.
        scale = -int(np.frexp(needs.seconds[-1])[1])
        self.elapsed, self.tails = np.ldexp(needs.seconds, scale), np.ldexp(needs.tails, scale)
        self.light_seconds = np.ldexp(needs.light_seconds, scale).astype(np.float32)
        before = np.concatenate([[0], np.cumsum(needs.saved)])[:-1]
        self.offset = (top - before) % slot
        # How many points it goes down: to what is left for s + 1 when s is kept, and for j when a_j is.
        self.keep_shift = np.append((needs.saved[:-1] - self.offset[:-1] + self.offset[1:]) // slot, 0)
        shift = -(-(needs.light[:-1] - self.offset[:-1] + self.offset[1:]) // slot)
        self.light_shift = np.append(np.minimum(shift, self.points), 0)
        self.pass_shift = np.minimum(-(-(needs.values[:-1] + self.offset) // slot), self.points)
        self.pass_shift[0] = 0
        self.least_keeping = np.maximum(self._point(needs.keeping), self.keep_shift[:, None])
        self.least_lightly = np.maximum(self._point(needs.lightly), self.light_shift[:, None])
        # table[t][s] is E(s, t, ·) behind pass_shift[s] infinities: columns 0 on of all j are E(j, t, m - a_j) for the
        # same m, so that one sum and one minimum over rows do the inner loop.
        width = self.points + int(self.pass_shift.max())
        self.table = [np.full((t + 1, width), np.inf, np.float32) for t in range(needs.chain.stages)]
        self._fill()
        self.again = self.table[-1][0, : self.points]  # E of the whole chain, in the same unit
        self._found: dict[int, tuple[Schedule, int]] = {}

    def fastest(self, room: int) -> Schedule | None:
        """The fastest schedule in some bytes beyond the chain's input, or none.

        float32 cannot tell schedules apart whose seconds are nearly equal: they are compared in float64, those at
        lower points too, lest the last digits make a larger room slower.
        """
        again = self.again[: self._reach(room) + 1]
        if not np.isfinite(again[-1:]).any():
            return None
        error = self.needs.chain.stages * 2.0**-20
        near = np.flatnonzero(again <= again[-1] * (1 + error))
        firsts = near[np.append(True, np.diff(again[near]) != 0)]
        found = (self._schedule(int(point))[0] for point in firsts)
        return min(found, key=lambda schedule: schedule.forward_seconds(self.needs.chain))

    def _reach(self, room: int) -> int:
        """The last point of which the schedule fits, with those of all points below; -1 for none.

        Rounding makes schedules smaller than their points allow: points beyond the room are tried, up to the first
        that really needs more.
        """
        point = max(-1, min((room - int(self.offset[0])) // self.slot, self.points - 1))
        while point + 1 < self.points and self._need(point + 1) <= room:
            point += 1
        return point

    def _need(self, point: int) -> int:
        """The bytes beyond the chain's input that the schedule at a point really needs."""
        again = self.again[point]
        first = self.points - int(np.searchsorted(self.again[::-1], again, side="right"))  # as fast as this one
        return self._schedule(first)[1] if np.isfinite(again) else 0

    def _schedule(self, point: int) -> tuple[Schedule, int]:
        if point not in self._found:
            chain = self.needs.chain
            schedule = unroll(chain.stages, point, self._decide)
            self._found[point] = schedule, simulate(chain, schedule).peak_bytes - chain.value_bytes[0]
        return self._found[point]

    def _fill(self) -> None:
        needs, stages, points = self.needs, self.needs.chain.stages, self.points
        whole = self._point(needs.whole)
        back = np.empty((stages, points), np.float32)  # [j - 1]: f_s + … + f_{j-1} - r_{j-1} + E(s, j - 1, ·), of s
        ways = np.empty((stages, points), np.float32)
        for s in range(stages - 1, -1, -1):
            start = int(self.pass_shift[s])
            rises = (s, *(s + 1 + np.flatnonzero(np.diff(needs.passed[s, s:]))).tolist())  # where passing needs more
            for t in range(s, stages):
                row = self.table[t][s, start : start + points]
                high = int(whole[s, t])  # from there all can be kept
                row[high:] = 0.0
                if t == s:
                    row[int(self.least_lightly[s, t]) : high] = self.light_seconds[s]
                else:
                    end = min(t, needs.segment_ends[s])
                    for first, last in itertools.pairwise((*(j for j in rises if j < end), end)):
                        low = self._point_of(s, needs.waiting[t] + needs.passed[s, first])
                        if low < high:
                            some = ways[: last - first, low:high]
                            np.add(self.table[t][first + 1 : last + 1, low:high], back[first:last, low:high], out=some)
                            best = some.min(axis=0)
                            np.minimum(row[low:high], best, out=row[low:high])
                    start_kept = int(self.least_keeping[s, t])
                    if start_kept < high:
                        kept = self._kept(s, t, start_kept, high)
                        np.minimum(row[start_kept:high], kept, out=row[start_kept:high])
                    start_light = int(self.least_lightly[s, t])
                    if needs.has_light and start_light < high:
                        light = self._light(s, t, start_light, high)
                        np.minimum(row[start_light:high], light, out=row[start_light:high])
                np.add(row, np.float32(self.elapsed[t + 1] - self.elapsed[s] - self.tails[t]), out=back[t])

    def _decide(self, first: int, last: int, point: int) -> Way:
        """What ``_fill`` took the minimum from, once more: choices would need a table as large as that of seconds."""
        if first == last:
            light = point < self.least_keeping[first, last] and self.needs.has_light
            return Way(first, 0, Action.LIGHT if light else Action.EVERYTHING)
        start = int(self.pass_shift[first])
        end = min(last, self.needs.segment_ends[first])
        back = np.array([self.table[t][first, start + point] for t in range(first, end)], np.float32)
        back += (self.elapsed[first + 1 : end + 1] - self.elapsed[first] - self.tails[first:end]).astype(np.float32)
        passed = self.table[last][first + 1 : end + 1, point] + back
        needed = self.needs.waiting[last] + self.needs.passed[first, first:end]
        passed[needed > point * self.slot + self.offset[first]] = np.inf
        least = passed.min(initial=np.inf)
        light = np.inf
        if self.needs.has_light and point >= self.least_lightly[first, last]:
            light = self._light(first, last, point, point + 1)[0]
        if point >= self.least_keeping[first, last] and self._kept(first, last, point, point + 1)[0] <= min(
            least, light
        ):
            return Way(first, point - int(self.keep_shift[first]))
        if light <= least and np.isfinite(light):
            return Way(first, point - int(self.light_shift[first]), Action.LIGHT)
        at = first + 1 + int(passed.argmin())
        return Way(at, point - int(self.pass_shift[at]))

    def _kept(self, s: int, t: int, low: int, high: int) -> NDArray[np.float32]:
        """E(s + 1, t, m - ā_s) for the points m from ``low`` to ``high``."""
        move = int(self.pass_shift[s + 1] - self.keep_shift[s])
        return self.table[t][s + 1, low + move : high + move]

    def _light(self, s: int, t: int, low: int, high: int) -> NDArray[np.float32]:
        """l_s + E(s + 1, t, m - ã_s) for the points m from ``low`` to ``high``."""
        move = int(self.pass_shift[s + 1] - self.light_shift[s])
        return self.table[t][s + 1, low + move : high + move] + self.light_seconds[s]

    def _point_of(self, s: int, need: int) -> int:
        """The first point of stage s that meets a need; one past the last where none does."""
        return min(max(-(-(int(need) - int(self.offset[s])) // self.slot), 0), self.points)

    def _point(self, need: NDArray[np.int64]) -> NDArray[np.int64]:
        """For needs by first stage, the first point that meets them; one past the last where none does."""
        return np.clip(-(-(need - self.offset[:, None]) // self.slot), 0, self.points)
