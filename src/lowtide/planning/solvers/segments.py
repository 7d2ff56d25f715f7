"""First guesses: keep the values that cross a few cuts of the forward pass, and recompute all else on demand.

Any position of the order is a cut, whatever number of values crosses it (Kusumoto et al., 2019: lower sets of the
graph). Two kinds of cuts are tried. Both have the fewest crossing bytes: among positions that end segments of about
equal bytes, or among a number of ops around.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from itertools import accumulate

import numpy as np

from lowtide.planning.solvers.runs import Again, Ops

_COUNTS = (1, 2, 3, 4, 6, 8, 11, 16, 23, 32, 45, 64, 91, 128, 181, 256)  # segments
_WIDTHS = (2, 3, 5, 8, 13, 21, 34, 55, 89)  # ops on either side of a cut
_WINDOW = 0.4  # of a segment's bytes: its end lies in the last part


def segmented(ops: Ops) -> Iterator[Again]:
    """Runs for several choices of cuts, each with its own values kept."""
    crossing = _Crossing(ops)
    cuts = [crossing.equal(count) for count in _COUNTS if count <= ops.backward + 1]
    cuts += [crossing.valleys(width) for width in _WIDTHS if width <= ops.backward]
    yield from (on_demand(ops, kept) for kept in dict.fromkeys(map(crossing.kept, cuts)))


def on_demand(ops: Ops, kept: Set[int]) -> Again:
    """Runs that recompute ops of the forward pass right before they are first read, once, with their sources."""
    again: dict[int, set[int]] = {}
    live = [op in kept or op not in ops.repeatable for op in range(ops.backward)] + [True] * (len(ops) - ops.backward)
    for turn in range(ops.backward, len(ops)):
        waiting = [op for op in ops.sources[turn] if not live[op]]
        while waiting:
            op = waiting.pop()
            if not live[op]:
                live[op] = True
                again.setdefault(turn, set()).add(op)
                waiting += [source for source in ops.sources[op] if not live[source]]
    return {turn: frozenset(runs) for turn, runs in again.items()}


class _Crossing:
    """Bytes that cross each position of the forward pass, and bytes that backward reads up to it."""

    def __init__(self, ops: Ops) -> None:
        self.ops = ops
        self.last = list(range(ops.backward))  # by op: its last reader in the forward pass
        saved = [False] * ops.backward
        for op, sources in enumerate(ops.sources):
            for source in sources:
                if op < ops.backward:
                    self.last[source] = op
                elif source < ops.backward:
                    saved[source] = True
        change = [0] * (ops.backward + 1)
        for op, last in enumerate(self.last):
            change[op] += ops.size[op]
            change[last] -= ops.size[op]
        self.bytes = list(accumulate(change[:-1]))  # that cross the position behind each op
        self.weight = list(accumulate(ops.size[op] if saved[op] else 0 for op in range(ops.backward)))

    def valleys(self, width: int) -> list[int]:
        """Positions with the fewest crossing bytes among as many ops before and behind, the last where many have."""
        crossing = np.array(self.bytes)
        padded = np.pad(crossing, width, constant_values=crossing.max(initial=0) + 1)
        windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * width + 1)
        later = windows[:, width + 1 :].min(axis=1)
        return np.flatnonzero((crossing <= windows.min(axis=1)) & (crossing < later)).tolist()

    def equal(self, count: int) -> list[int]:
        """Positions behind which a segment ends, for segments of about the same bytes."""
        most = self.weight[-1] / count
        cuts: list[int] = []
        best, start = -1, 0
        for op in range(self.ops.backward):
            weight = self.weight[op] - start
            if best >= 0 and weight > most:
                cuts.append(best)
                start, best = self.weight[best], -1
                weight = self.weight[op] - start
            if weight >= (1 - _WINDOW) * most and (best < 0 or self.bytes[op] <= self.bytes[best]):
                best = op
        return cuts

    def kept(self, cuts: list[int]) -> frozenset[int]:
        """Ops whose results cross a cut."""
        kept: set[int] = set()
        remaining = list(cuts)
        for op, last in enumerate(self.last):
            while remaining and remaining[0] < op:
                remaining.pop(0)
            if remaining and remaining[0] < last:
                kept.add(op)
        return frozenset(kept)
