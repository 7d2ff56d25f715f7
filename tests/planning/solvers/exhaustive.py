"""Random graphs of a few ops, and the best that any choice of runs can do on them, by trying all."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import chain, combinations

from lowtide.planning.solvers.runs import Ops


def random_ops(seed: int, forward: int = 5) -> Ops:
    """A random graph: a forward pass, and a backward op for each of its ops."""
    draw = random.Random(seed)
    reads: list[tuple[int, ...]] = []
    for op in range(forward):
        before = {op - 1} | {draw.randrange(op) for _ in range(draw.randrange(2))} if op else set[int]()
        reads.append(tuple(sorted(before)))
    users = {op: [user for user in range(forward) if op in reads[user]] for op in range(forward)}
    gradient = {op: 2 * forward - 1 - op for op in range(forward)}
    for op in reversed(range(forward)):
        saved = set(reads[op]) if draw.random() < 0.7 else {op}
        reads.append(tuple(sorted(saved | {gradient[user] for user in users[op]})))
    sizes = [draw.randint(1, 9) for _ in range(forward)]
    return Ops(
        reads=tuple(reads),
        makes=tuple((op,) for op in range(2 * forward)),
        bytes=(*sizes, *reversed(sizes)),
        seconds=tuple(float(draw.randint(1, 9)) for _ in range(2 * forward)),
        backward=forward,
        repeatable=frozenset(range(forward)),
    )


def best_seconds(ops: Ops, budget: int) -> float | None:
    """The fewest seconds of ops that run again within a budget; None if no choice fits."""
    ways = {frozenset[int](): 0.0}
    for stage in range(len(ops)):
        following: dict[frozenset[int], float] = {}
        for live, seconds in ways.items():
            for again in _subsets(set(range(ops.backward)) - live) if stage >= ops.backward else [()]:
                longer = seconds + sum(ops.seconds[op] for op in again)
                for left, peak in _ends(ops, stage, live, again):
                    if peak <= budget and longer < following.get(left, float("inf")):
                        following[left] = longer
        ways = following
    return min(ways.values(), default=None)


def best_peak(ops: Ops) -> int:
    """The smallest peak of any choice."""
    low, high = 0, sum(ops.bytes)
    while low < high:
        middle = (low + high) // 2
        if best_seconds(ops, middle) is None:
            low = middle + 1
        else:
            high = middle
    return high


def _subsets(values: set[int]) -> Iterator[tuple[int, ...]]:
    ordered = sorted(values)
    return chain.from_iterable(combinations(ordered, size) for size in range(len(ordered) + 1))


def _ends(ops: Ops, stage: int, live: frozenset[int], again: tuple[int, ...]) -> Iterator[tuple[frozenset[int], int]]:
    """Values that may be left after an op and others before it, with the peak meanwhile."""
    runs = (*again, stage)
    present = set(live)
    last: dict[int, int] = {}
    for place, run in enumerate(runs):
        if not present.issuperset(ops.reads[run]):
            return
        last.update(dict.fromkeys(ops.reads[run], place))
        present.add(run)
    read_later = {value for op in range(stage + 1, len(ops)) for value in ops.reads[op]}
    gradients = {value for value in present if value >= ops.backward and value in read_later}
    for chosen in _subsets({value for value in present if value < ops.backward}):
        left = gradients.union(chosen)
        peak = 0
        for place, run in enumerate(runs):
            made = {*live, *runs[: place + 1]}
            alive = [v for v in made if v == run or v in left or last.get(v, -1) >= place]
            peak = max(peak, sum(ops.bytes[value] for value in alive))
        yield frozenset(left), peak
