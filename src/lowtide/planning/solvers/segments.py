"""First guesses: keep the values that cross a few cuts of the forward pass, and recompute all else on demand.

Any position of the order is a cut, whatever number of values crosses it (Kusumoto et al., 2019: lower sets of the
graph). Within a window of bytes the cut with the fewest crossing bytes is taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from itertools import accumulate

from lowtide.planning.solvers.runs import Again, Ops

_COUNTS = (1, 2, 3, 4, 6, 8, 11, 16, 23, 32, 45, 64, 91, 128, 181, 256)  # segments
_WINDOW = 0.4  # of a segment's bytes: its end lies in the last part


def segmented(ops: Ops) -> Iterator[Again]:
    """Runs for more and more segments."""
    crossing = _Crossing(ops)
    seen: set[tuple[int, ...]] = set()
    for count in _COUNTS:
        cuts = crossing.cuts(count)
        if count - 1 > ops.backward:
            return
        if cuts not in seen:
            seen.add(cuts)
            yield on_demand(ops, crossing.kept(cuts))


def on_demand(ops: Ops, kept: Set[int]) -> Again:
    """Runs that recompute ops of the forward pass right before they are first read, once, with their sources."""
    again: dict[int, set[int]] = {}
    live = [op in kept or op not in ops.repeatable for op in range(ops.backward)] + [True] * (len(ops) - ops.backward)
    for stage in range(ops.backward, len(ops)):
        waiting = [op for op in ops.sources[stage] if not live[op]]
        while waiting:
            op = waiting.pop()
            if not live[op]:
                live[op] = True
                again.setdefault(stage, set()).add(op)
                waiting += [source for source in ops.sources[op] if not live[source]]
    return {stage: frozenset(runs) for stage, runs in again.items()}


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

    def cuts(self, count: int) -> tuple[int, ...]:
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
        return tuple(cuts)

    def kept(self, cuts: tuple[int, ...]) -> set[int]:
        """Ops whose results cross a cut."""
        kept: set[int] = set()
        remaining = list(cuts)
        for op, last in enumerate(self.last):
            while remaining and remaining[0] < op:
                remaining.pop(0)
            if remaining and remaining[0] < last:
                kept.add(op)
        return kept
