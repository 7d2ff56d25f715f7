"""The fastest schedule of a chain that fits a budget in bytes: Rotor's dynamic programme (Beaumont et al., 2019).

E(s, t, m) are the seconds of recomputing while stages s to t go forward and backward in m bytes beyond the input of s.
Here f are forward seconds, r their tail, a value bytes. A variant saves ā bytes and takes l seconds (see ``Needs``).

    E(s, s, m) = min over variants of l_s                            if m >= keeping(s, s)
    E(s, t, m) = min( over variants of l_s + E(s + 1, t, m - ā_s)    if m >= keeping(s, t): keep s
                      min over s < j <= t of                         if m >= waiting(t) + passed(s, j - 1): keep a_s,
                        f_s + … + f_{j-1} - r_{j-1} + E(j, t, m - a_j) + E(s, j - 1, m) )    go on to j, and come back

and infinity otherwise. j goes no further than a segment that starts with s may end.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lowtide.chains.chain import Chain
from lowtide.chains.needs import Needs, Smallest
from lowtide.chains.schedule import Schedule, Way, simulate, unroll
from lowtide.chains.simple import keep_all
from lowtide.errors import BudgetError, LowtideError
from lowtide.sizes import format_size


def optimal(chain: Chain, budget_bytes: int, slots: int = 500) -> Schedule:
    """The fastest schedule whose peak, as ``simulate`` counts it, is at most a budget.

    It is the fastest persistent one: a schedule in which kept values stay until their backward has used them.
    ``slots`` must divide memory finely enough, see ``OptimalSchedules``, which serves several budgets of one chain.
    Raises ``BudgetError`` with the smallest possible budget.

    >>> print(optimal(Chain.uniform(4), budget_bytes=6))
    F1e, F2c, F3n, F4e, B4, F2e, F3e, B3, B2, B1
    """
    return OptimalSchedules(chain, slots).schedule(budget_bytes)


class OptimalSchedules:
    """The optimal schedules of a chain, at any budget.

    Memory is counted in slots, on grids that depend on the chain alone. The first grid covers the bytes of keeping
    everything, each further one the lowest quarter of the one before. Sizes are rounded so that a schedule never
    needs more than its budget. A larger budget has every schedule of a smaller one, so it is never slower.
    A chain with fewer bytes than slots is not rounded. Its schedule is then the best persistent one, as long as no
    gradient is larger than its value.

    A grid of n stages takes O(n³ · slots) time and 2 · n² · slots bytes. It is built when a budget first needs it;
    most budgets need one or two. ``segment_ends`` is as for ``Needs``.
    """

    def __init__(self, chain: Chain, slots: int = 500, segment_ends: Sequence[int] = ()) -> None:
        if slots < 1:
            raise LowtideError(f"Memory is divided into at least one slot, not {slots}")
        self.chain = chain
        self.slots = slots
        self._needs = Needs(chain, segment_ends)
        self._grids: dict[int, _Grid] = {}

    @property
    def smallest_bytes(self) -> int:
        """The smallest possible budget, to the byte."""
        return self._smallest.peak_bytes

    def schedule(self, budget_bytes: int) -> Schedule:
        """The fastest schedule for a budget."""
        room = int(budget_bytes) - self.chain.value_bytes[0]
        if room >= self._needs.whole[0, -1]:
            return keep_all(self.chain)
        if budget_bytes < self.smallest_bytes:
            raise BudgetError(
                f"{format_size(max(budget_bytes, 0))} is below the smallest schedule of this chain of "
                f"{self.chain.stages} stages ({format_size(self.smallest_bytes)}, {self.smallest_bytes} bytes)",
                smallest_bytes=self.smallest_bytes,
            )
        return min(self._candidates(room), key=self._seconds)

    def _candidates(self, room: int) -> list[Schedule]:
        """The fastest schedule of the finest grid that covers the room, and of each finer grid that may matter.

        A finer grid is better only where rounding matters. It is left out when no schedule in the bytes that it
        covers can be as fast as a candidate. Larger budgets therefore see every candidate of smaller ones.
        """
        least = self.smallest_bytes - self.chain.value_bytes[0]
        top = int(self._needs.whole[0, -1])
        while top // 4 >= room:
            top //= 4
        candidates: list[Schedule] = []
        while True:
            if top not in self._grids:
                self._grids[top] = _Grid(self._needs, top, self.slots)
            fastest = self._grids[top].fastest(room)
            candidates += [fastest] if fastest else []
            exact = top <= self.slots
            top //= 4
            if exact or (candidates and min(map(self._seconds, candidates)) < self._least_seconds(max(top, least))):
                return candidates
            if top < least:
                return [*candidates, self._smallest_schedule]

    def _least_seconds(self, room: int) -> float:
        """A lower bound on the forward seconds of any schedule in a room.

        Before the first backward, the saved bytes of kept stages fit into the room. Other stages run once more, but
        for their tails. The bound is that of the fractional knapsack, with cheap results recomputed for nothing.
        """
        seconds, saved = np.array(self.chain.forward_seconds), self._needs.variants[-1].saved.astype(float)
        again = seconds - self._needs.tails
        order = np.argsort(-again / np.maximum(saved, 1e-9))
        shares = np.clip((room - np.cumsum(saved[order])) / np.maximum(saved[order], 1) + 1, 0, 1)
        return float(seconds.sum() + (again[order] * (1 - shares)).sum()) * (1 - 1e-9)

    def _seconds(self, schedule: Schedule) -> float:
        return schedule.forward_seconds(self.chain)

    @cached_property
    def _smallest(self) -> Smallest:
        return Smallest(self._needs)

    @cached_property
    def _smallest_schedule(self) -> Schedule:
        return self._smallest.schedule()


class _Grid:
    """E for all parts of a chain, at about ``slots`` points of memory up to ``top`` bytes.

    Point i stands for ``i * slot + offset[s]`` bytes in the parts that start with stage s. With these offsets, keeping
    everything of a stage leads from one point right to another. Checkpoints and cheap results are rounded: the bytes
    left after one are the next point below. With fewer bytes than slots a slot is a byte, and all is exact.
    """

    def __init__(self, needs: Needs, top: int, slots: int) -> None:
        self.needs = needs
        self.slot = slot = max(1, -(-top // slots))
        self.points = top // slot + 1
        # Seconds as a share of a power of two: float32 has whole seconds exactly, and nothing overflows.
        scale = -int(np.frexp(max(needs.seconds[-1], *(variant.seconds.sum() for variant in needs.variants)))[1])
        self.elapsed, self.tails = np.ldexp(needs.seconds, scale), np.ldexp(needs.tails, scale)
        self.extra = [np.ldexp(variant.seconds, scale).astype(np.float32) for variant in needs.variants]
        before = np.concatenate([[0], np.cumsum(needs.saved)])[:-1]
        self.offset = (top - before) % slot
        # Points down to the bytes left: for s + 1 when s is kept, and for j when a_j is.
        self.keep_shift = [self._shift(variant.saved) for variant in needs.variants]
        self.pass_shift = np.minimum(-(-(needs.values[:-1] + self.offset) // slot), self.points)
        self.pass_shift[0] = 0
        self.least = [
            np.maximum(self._point(variant.keeping), shift[:, None])
            for variant, shift in zip(needs.variants, self.keep_shift, strict=True)
        ]
        # table[t][s] is E(s, t, ·) behind pass_shift[s] infinities. A column then holds E(j, t, m - a_j) of all j for
        # the same m. One sum and one minimum over rows do the inner loop.
        width = self.points + int(self.pass_shift.max())
        self.table = [np.full((t + 1, width), np.inf, np.float32) for t in range(needs.chain.stages)]
        self._fill()
        self.again = self.table[-1][0, : self.points]  # E of the whole chain, in the same unit
        self._schedules: dict[int, tuple[Schedule, int]] = {}

    def fastest(self, room: int) -> Schedule | None:
        """The fastest schedule in some bytes beyond the chain's input, or none.

        float32 cannot tell nearly equal seconds apart, so near schedules are compared in float64. Schedules at lower
        points take part too, lest the last digits make a larger room slower.
        """
        again = self.again[: self._reach(room) + 1]
        if not np.isfinite(again[-1:]).any():
            return None
        error = self.needs.chain.stages * 2.0**-20
        near = np.flatnonzero(again <= again[-1] * (1 + error))
        firsts = near[np.append(True, np.diff(again[near]) != 0)]
        schedules = (self._schedule(int(point))[0] for point in firsts)
        return min(schedules, key=lambda schedule: schedule.forward_seconds(self.needs.chain))

    def _reach(self, room: int) -> int:
        """The last point whose schedule fits, with those of all points below; -1 for none.

        Rounding makes schedules smaller than their points allow. Points beyond the room are tried, up to the first
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
        if point not in self._schedules:
            chain = self.needs.chain
            schedule = unroll(chain.stages, point, self._decide)
            self._schedules[point] = schedule, simulate(chain, schedule).peak_bytes - chain.value_bytes[0]
        return self._schedules[point]

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
                high = int(whole[s, t])  # from there on everything is kept
                row[high:] = 0.0
                end = min(t, needs.segment_ends[s])
                for first, last in itertools.pairwise((*(j for j in rises if j < end), end)):
                    low = self._point_of(s, needs.waiting[t] + needs.passed[s, first])
                    if low < high:
                        some = ways[: last - first, low:high]
                        np.add(self.table[t][first + 1 : last + 1, low:high], back[first:last, low:high], out=some)
                        np.minimum(row[low:high], some.min(axis=0), out=row[low:high])
                for variant, least in enumerate(self.least):
                    low = int(least[s, t])
                    if low < high:
                        np.minimum(row[low:high], self._seconds_if_kept(variant, s, t, low, high), out=row[low:high])
                np.add(row, np.float32(self.elapsed[t + 1] - self.elapsed[s] - self.tails[t]), out=back[t])

    def _decide(self, first: int, last: int, point: int) -> Way:
        """Repeat a minimum of ``_fill``. Storing choices would take a table as large as that of seconds."""
        kept_seconds = [
            float(self._seconds_if_kept(variant, first, last, point, point + 1)[0])
            if point >= least[first, last]
            else np.inf
            for variant, least in enumerate(self.least)
        ]
        start = int(self.pass_shift[first])
        end = min(last, self.needs.segment_ends[first])
        back = np.array([self.table[t][first, start + point] for t in range(first, end)], np.float32)
        back += (self.elapsed[first + 1 : end + 1] - self.elapsed[first] - self.tails[first:end]).astype(np.float32)
        passed = self.table[last][first + 1 : end + 1, point] + back
        needed = self.needs.waiting[last] + self.needs.passed[first, first:end]
        passed[needed > point * self.slot + self.offset[first]] = np.inf
        best = min(range(len(kept_seconds)), key=kept_seconds.__getitem__)
        if kept_seconds[best] <= passed.min(initial=np.inf):
            return Way(first, point - int(self.keep_shift[best][first]), self.needs.variants[best].kind)
        at = first + 1 + int(passed.argmin())
        return Way(at, point - int(self.pass_shift[at]))

    def _seconds_if_kept(self, variant: int, s: int, t: int, low: int, high: int) -> NDArray[np.float32]:
        """l_s + E(s + 1, t, m - ā_s) for the points m from ``low`` to ``high``; l_s where s is t."""
        extra = self.extra[variant][s]
        if s == t:
            return np.full(high - low, extra)
        move = int(self.pass_shift[s + 1] - self.keep_shift[variant][s])
        rest = self.table[t][s + 1, low + move : high + move]
        return rest + extra if extra else rest

    def _shift(self, saved: NDArray[np.int64]) -> NDArray[np.int64]:
        shift = -(-(saved[:-1] - self.offset[:-1] + self.offset[1:]) // self.slot)
        return np.append(np.minimum(shift, self.points), 0)

    def _point_of(self, s: int, need: int) -> int:
        """The first point of stage s that meets a need; one past the last where none does."""
        return min(max(-(-(int(need) - int(self.offset[s])) // self.slot), 0), self.points)

    def _point(self, need: NDArray[np.int64]) -> NDArray[np.int64]:
        """For needs by first stage, the first point that meets them; one past the last where none does."""
        return np.clip(-(-(need - self.offset[:, None]) // self.slot), 0, self.points)
