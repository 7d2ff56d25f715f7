"""Lower bounds for ops in a fixed order: on the peak, and on the seconds that a budget costs."""

from __future__ import annotations

from bisect import bisect_left
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from lowtide.planning.solvers.runs import RunTimeline

_PLACES = 32  # ops of the plain order at which a knapsack is filled: more raise the bound little


class LowerBounds:
    """Bytes and seconds that no choice of runs can beat."""

    def __init__(self, plain: RunTimeline) -> None:
        self.plain, self.ops = plain, plain.ops

    @cached_property
    def peak_bytes(self) -> int:
        """The most that any op needs at once: its inputs, its results, and values that cannot be recomputed by then."""
        return int((self.plain.live - self._freeable_bytes).max(initial=0))

    def seconds(self, budget_bytes: int) -> float:
        """Seconds that a budget costs at least.

        At each op, values that do not fit have to be recomputed later. The cheapest for their bytes, parts of values
        included, are a lower bound: a relaxed knapsack. Infinite below the smallest peak.
        """
        if budget_bytes < self.peak_bytes:
            return float("inf")
        excess = self.plain.live - budget_bytes
        places = [place for place in np.argsort(-excess, kind="stable") if excess[place] > 0]
        step = max(1, len(places) // _PLACES)
        return max((self._knapsack(int(place), int(excess[place])) for place in places[::step]), default=0.0)

    def _knapsack(self, place: int, excess: int) -> float:
        sizes: dict[int, int] = {}  # of results that are freed together, by op
        for value in self._freeable(place):
            op = self.ops.maker[value]
            sizes[op] = sizes.get(op, 0) + self.ops.bytes[value]
        seconds = 0.0
        for op in sorted(sizes, key=lambda op: self.ops.seconds[op] / max(sizes[op], 1)):
            part = min(1.0, excess / max(sizes[op], 1))
            seconds += part * self.ops.seconds[op]
            excess -= sizes[op]
            if excess <= 0:
                break
        return seconds

    def _freeable(self, place: int) -> list[int]:
        """Values that live at an op of the plain order and may be recomputed after it."""
        return [value for value, first, last in self._gaps if first <= place < last]

    @cached_property
    def _gaps(self) -> list[tuple[int, int, int]]:
        """Values that an op may recompute, and the places at which they live unread before a read in backward."""
        ops, gaps = self.ops, list[tuple[int, int, int]]()
        for value, born, _ in self.plain.spans:
            if ops.maker[value] not in ops.repeatable or value in ops.held:
                continue
            reads = [born, *self.plain.is_read[value, born]]
            late = bisect_left(reads, ops.backward)
            for before, following in pairwise(reads[max(late, 1) - 1 :]):
                overwritten = bool(ops.over) and value in ops.over[before]  # if the value is freed there
                gaps.append((value, before + (not overwritten), following))
        return gaps

    @cached_property
    def _freeable_bytes(self) -> NDArray[np.int64]:
        change = np.zeros(len(self.ops) + 1, np.int64)
        for value, first, last in self._gaps:
            change[first] += self.ops.bytes[value]
            change[last] -= self.ops.bytes[value]
        return np.cumsum(change[:-1])
