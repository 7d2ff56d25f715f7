"""The smallest peak that a schedule of a chain can have, and a fast schedule among those that have it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lowtide.chains.chain import Chain
from lowtide.chains.needs import Needs
from lowtide.chains.schedule import Action, Schedule, Way, unroll


class Smallest:
    """The least bytes in which each part of a chain can run, to the byte, in O(n³) time and O(n²) memory.

    With L(s, t) those of stages s to t beyond the input of s, and a, ā, ``keeping`` and ``passed`` as in ``Chain``
    and ``Needs``:

        L(s, s) = min(keeping(s, s), lightly(s, s))
        L(s, t) = min( max(keeping(s, t), ā_s + L(s + 1, t)), the same lightly,
                       min over s < j <= t of max(waiting(t) + passed(s, j - 1), a_j + L(j, t), L(s, j - 1)) )

    with j no further than where a segment that starts with s may end.
    Of ways with the same bytes the fastest is taken. Going down from the whole chain, a part may then take a faster
    way that needs no more than what is left to it.
    """

    def __init__(self, chain: Chain, needs: Needs) -> None:
        self.chain = chain
        self.needs = needs
        shape = chain.stages, chain.stages
        self._least: NDArray[np.int64] = np.zeros(shape, np.int64)  # [s, t]: L
        self._after: NDArray[np.int64] = np.zeros(shape, np.int64)  # [t, j]: a_j + L(j, t)
        self._seconds = np.zeros(shape)  # [s, t]: of running stages of this part again
        self._seconds_after = np.zeros(shape)  # [t, j]: the same
        for s in range(chain.stages - 1, -1, -1):
            for t in range(s, chain.stages):
                need, again = self._ways(s, t)
                least = int(need.min())
                seconds = again[need == least].min()
                self._least[s, t] = least
                self._after[t, s] = needs.values[s] + least
                self._seconds[s, t] = self._seconds_after[t, s] = seconds

    @property
    def peak_bytes(self) -> int:
        """The smallest budget that can be kept."""
        return int(self._after[-1, 0])

    def schedule(self) -> Schedule:
        """A schedule with that peak."""
        return unroll(self.chain.stages, int(self._least[0, -1]), self._decide)

    def _decide(self, first: int, last: int, room: int) -> Way:
        need, again = self._ways(first, last)
        way = int(np.where(need <= room, again, np.inf).argmin())
        if way == 0:
            return Way(first, room - int(self.needs.saved[first]))
        if way == 1:
            return Way(first, room - int(self.needs.light[first]), Action.LIGHT)
        at = first + way - 1
        return Way(at, room - int(self.needs.values[at]))

    def _ways(self, s: int, t: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Bytes and seconds of keeping stage s, of keeping it lightly, and of passing on to each later one up to t."""
        needs = self.needs
        end = min(t, needs.segment_ends[s])
        rest, seconds = (self._least[s + 1, t], self._seconds[s + 1, t]) if s < t else (0, 0.0)
        need = np.empty(end - s + 2, np.int64)
        need[0] = max(needs.keeping[s, t], needs.saved[s] + rest)
        need[1] = max(needs.lightly[s, t], needs.light[s] + rest)
        np.maximum(self._after[t, s + 1 : end + 1], self._least[s, s:end], out=need[2:])
        np.maximum(need[2:], needs.waiting[t] + needs.passed[s, s:end], out=need[2:])
        again = np.empty(end - s + 2)
        again[0] = seconds
        again[1] = seconds + needs.light_seconds[s]
        np.add(self._seconds_after[t, s + 1 : end + 1], self._seconds[s, s:end], out=again[2:])
        again[2:] += needs.seconds[s + 1 : end + 1] - needs.seconds[s] - needs.tails[s:end]
        return need, again
