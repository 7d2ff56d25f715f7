"""Buffer placement: static offsets in one arena, tags that are passed on, and an online pool."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lowtide.planning.programs.liveness import Life, peak_bytes


@dataclass(frozen=True)
class Placement:
    """Offset of each life in one block of memory, and the block's size. Empty lives have offset 0."""

    offsets: tuple[int, ...]
    bytes: int


def arena(lives: Sequence[Life]) -> Placement:
    """Plan static offsets: the largest life first, each into the smallest gap that fits during its life.

    Tries the longest first too, unless the arena is as small as the live bytes. O(n·k·log k), with k lives at a time.

    >>> arena([Life(0, 1, 4), Life(1, 2, 2), Life(2, 3, 4)])
    Placement(offsets=(0, 4, 0), bytes=6)
    """
    counted = [i for i, life in enumerate(lives) if life.bytes]
    best: Placement | None = None
    for key in (_by_size_and_birth, _by_size_and_length, _by_length_and_size):
        placed = _place(lives, sorted(counted, key=lambda i, key=key: (*key(lives[i]), i)))
        best = placed if best is None or placed.bytes < best.bytes else best
        if best.bytes == peak_bytes(lives):
            break
    assert best is not None
    return best


def _by_size_and_birth(life: Life) -> tuple[int, int]:
    return -life.bytes, life.born


def _by_size_and_length(life: Life) -> tuple[int, int]:
    return -life.bytes, life.born - life.dies


def _by_length_and_size(life: Life) -> tuple[int, int]:
    return life.born - life.dies, -life.bytes


def _place(lives: Sequence[Life], order: Sequence[int]) -> Placement:
    starts = np.zeros(len(lives), np.int64)
    sizes = np.array([life.bytes for life in lives], np.int64)
    placed = _LivesByTime(1 + max((life.dies for life in lives), default=0))
    total = 0
    for i in order:
        others = placed.during(lives[i])
        if others:
            starts[i] = _best_fit(starts[others], sizes[others], lives[i].bytes)
        total = max(total, int(starts[i]) + lives[i].bytes)
        placed.add(i, lives[i])
    return Placement(tuple(starts.tolist()), total)


def _best_fit(starts: NDArray[np.int64], sizes: NDArray[np.int64], wanted: int) -> int:
    """Start of the smallest gap that is large enough, or else the end of the last block."""
    order = np.argsort(starts, kind="stable")
    ends = np.maximum.accumulate((starts + sizes)[order])
    begins = np.concatenate(([0], ends[:-1]))  # of the gap before each block
    gaps = starts[order] - begins
    fits = np.flatnonzero(gaps >= wanted)
    return int(begins[fits[np.argmin(gaps[fits])]] if len(fits) else ends[-1])


class _LivesByTime:
    """Index lives by time: a segment tree finds those alive at a moment, a sorted list those born in a span."""

    def __init__(self, moments: int) -> None:
        self.size = moments
        self.tree: list[list[int]] = [[] for _ in range(2 * moments)]
        self.births: list[tuple[int, int]] = []

    def add(self, i: int, life: Life) -> None:
        insort(self.births, (life.born, i))
        low, high = life.born + self.size, life.dies + self.size + 1
        while low < high:
            if low & 1:
                self.tree[low].append(i)
                low += 1
            if high & 1:
                high -= 1
                self.tree[high].append(i)
            low, high = low >> 1, high >> 1

    def during(self, life: Life) -> list[int]:
        alive: list[int] = []
        at = life.born + self.size
        while at:
            alive += self.tree[at]
            at >>= 1
        after, end = (bisect_left(self.births, (moment + 1, -1)) for moment in (life.born, life.dies))
        return alive + [i for _, i in self.births[after:end]]


@dataclass(frozen=True)
class Tags:
    """Buffer of each life (-1 for empty ones), and bytes of each buffer: those of its largest life."""

    tags: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return sum(self.sizes)


def share(lives: Sequence[Life]) -> Tags:
    """Pass buffers on by reference counts, with a set of free tags, as executors of static graphs do.

    A life gets the smallest free buffer that is large enough; else the largest free one grows; else a new one.

    >>> share([Life(0, 1, 4), Life(1, 2, 2), Life(2, 3, 4)])
    Tags(tags=(0, 1, 0), sizes=(4, 2))
    """
    tags, sizes = [-1] * len(lives), list[int]()
    box: list[tuple[int, int]] = []  # free: bytes and tag
    for i, is_birth in _events(lives):
        if not lives[i].bytes:
            continue
        if not is_birth:
            insort(box, (sizes[tags[i]], tags[i]))
            continue
        at = bisect_left(box, (lives[i].bytes, -1))
        if box:
            _, tags[i] = box.pop(min(at, len(box) - 1))
            sizes[tags[i]] = max(sizes[tags[i]], lives[i].bytes)
        else:
            tags[i] = len(sizes)
            sizes.append(lives[i].bytes)
    return Tags(tuple(tags), tuple(sizes))


def pool(lives: Sequence[Life]) -> Placement:
    """Simulate an online pool: best fit from a free list with splits and merges; it grows where nothing fits.

    >>> pool([Life(0, 1, 2), Life(1, 2, 1), Life(2, 3, 3)])  # the first two bytes are free, but three are needed
    Placement(offsets=(0, 2, 3), bytes=6)
    """
    offsets = [0] * len(lives)
    space = _Space()
    for i, is_birth in _events(lives):
        if not lives[i].bytes:
            continue
        if is_birth:
            offsets[i] = space.take(lives[i].bytes)
        else:
            space.give_back(offsets[i], lives[i].bytes)
    return Placement(tuple(offsets), space.bytes)


class _Space:
    """Memory from 0 up, with its free blocks by size and by both of their ends."""

    def __init__(self) -> None:
        self.bytes = 0
        self.free: list[tuple[int, int]] = []  # size and start
        self.sizes: dict[int, int] = {}  # by start
        self.starts: dict[int, int] = {}  # by end

    def take(self, size: int) -> int:
        at = bisect_left(self.free, (size, -1))
        if at < len(self.free):
            room, start = self.free[at]
            self._forget(start)
            if room > size:
                self._note(start + size, room - size)
            return start
        start = self.starts.get(self.bytes, self.bytes)  # a free block at the end grows
        if start < self.bytes:
            self._forget(start)
        self.bytes = start + size
        return start

    def give_back(self, start: int, size: int) -> None:
        if (before := self.starts.get(start)) is not None:
            self._forget(before)
            start, size = before, size + start - before
        if (after := self.sizes.get(start + size)) is not None:
            self._forget(start + size)
            size += after
        self._note(start, size)

    def _note(self, start: int, size: int) -> None:
        insort(self.free, (size, start))
        self.sizes[start], self.starts[start + size] = size, start

    def _forget(self, start: int) -> None:
        size = self.sizes.pop(start)
        del self.starts[start + size]
        del self.free[bisect_left(self.free, (size, start))]


def _events(lives: Sequence[Life]) -> Iterator[tuple[int, bool]]:
    """Births and deaths in order: an op's results are born before its last-read inputs are freed."""
    events = [(life.born, 0, i) for i, life in enumerate(lives)] + [(life.dies, 1, i) for i, life in enumerate(lives)]
    return ((i, not dies) for _, dies, i in sorted(events))
