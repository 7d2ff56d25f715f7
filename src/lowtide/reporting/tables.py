"""Rows that the terminal, the figures and the HTML page share, as functions over a profile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter
from pathlib import PurePath
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lowtide.profiling.profile import Comparison, Profile
from lowtide.tracing.graph import Category, Graph, Phase, Saved

if TYPE_CHECKING:
    from lowtide.profiling.sweep import Sweep, SweepPoint


@dataclass(frozen=True, slots=True)
class SavedRow:
    """A storage saved for the backward pass: one row, however many tensors were saved from it."""

    bytes: int
    shape: tuple[int, ...]
    dtype: str
    category: Category
    made_by: str
    made_in: str
    needed_by: tuple[str, ...]  # distinct ops, in the order in which they saved it
    needed_in: tuple[str, ...]
    source: str


def saved_rows(profile: Profile) -> list[SavedRow]:
    """Storages saved for the backward pass, largest first. The activations add up to ``profile.saved_bytes``."""
    sizes = {s.id: s.bytes for s in profile.graph.on_device}
    groups: dict[int, list[Saved]] = {}
    for tensor in profile.saved:
        if tensor.storage in sizes:
            groups.setdefault(tensor.storage, []).append(tensor)
    rows: list[SavedRow] = []
    for storage, tensors in groups.items():
        largest = max(tensors, key=lambda t: t.bytes)
        needed_by = tuple(dict.fromkeys(t.needed_by for t in tensors))
        needed_in = tuple(dict.fromkeys(t.needed_in for t in tensors))
        origin = (largest.shape, largest.dtype, largest.category, largest.made_by, largest.made_in)
        rows.append(SavedRow(sizes[storage], *origin, needed_by, needed_in, largest.source))
    return sorted(rows, key=lambda row: row.bytes, reverse=True)


@dataclass(frozen=True, slots=True)
class WorkspaceRow:
    """Bytes that one kernel allocates inside itself, once for all calls with the same signature."""

    bytes: int
    name: str
    phase: Phase
    shapes: tuple[tuple[int, ...], ...]
    module: str  # of the first call
    source: str
    calls: int


def workspace_rows(profile: Profile, limit: int | None = None) -> list[WorkspaceRow]:
    """The kernels that need room above their outputs, largest first."""
    groups: dict[tuple[str, Phase], WorkspaceRow] = {}
    for op in profile.graph.ops:
        if op.workspace_bytes > 0:
            shapes = tuple(view.shape for view in op.inputs)
            new = WorkspaceRow(op.workspace_bytes, op.name, op.phase, shapes, op.module, op.source, calls=0)
            row = groups.get((op.signature, op.phase), new)
            larger = max(row.bytes, op.workspace_bytes)
            groups[op.signature, op.phase] = replace(row, bytes=larger, calls=row.calls + 1)
    return sorted(groups.values(), key=lambda row: row.bytes, reverse=True)[:limit]


@dataclass(frozen=True, slots=True)
class Holder:
    """Bytes alive at the peak that one module made or owns, without the modules below it."""

    path: str
    sizes: Counter[Category]

    @property
    def bytes(self) -> int:
        """All categories together."""
        return self.sizes.total()


def holders(profile: Profile, limit: int) -> list[Holder]:
    """The modules that hold most at the peak, largest first."""
    held: dict[str, Counter[Category]] = {}
    for storage in profile.alive_at_peak:
        held.setdefault(storage.module, Counter())[storage.category] += storage.bytes
    rows = (Holder(path, sizes) for path, sizes in held.items())
    return sorted(rows, key=lambda row: row.bytes, reverse=True)[:limit]


class PhaseRun(NamedTuple):
    """Consecutive ops of one phase: ``start`` to ``end - 1``."""

    phase: Phase
    start: int
    end: int


def phase_runs(graph: Graph) -> list[PhaseRun]:
    """The phases in the order in which they ran; accumulation over microbatches gives several of each."""
    runs = (list(ops) for _, ops in groupby(graph.ops, key=lambda op: op.phase))
    return [PhaseRun(ops[0].phase, ops[0].index, ops[-1].index + 1) for ops in runs]


def buckets(live: NDArray[np.int64], count: int) -> list[int]:
    """The highest op of each of ``count`` equal stretches of the step. The peak is one of them.

    >>> buckets(np.array([1, 5, 2, 2, 9, 3]), 3), buckets(np.array([4, 7]), 4)
    ([1, 2, 4], [0, 0, 1, 1])
    """
    chosen: list[int] = []
    for column in range(count if len(live) else 0):
        start = column * len(live) // count
        end = max(start + 1, (column + 1) * len(live) // count)
        chosen.append(start + int(np.argmax(live[start:end])))
    return chosen


def saved_changes(comparison: Comparison, limit: int = 20) -> list[tuple[str, str, int, int]]:
    """Modules that save more or less than before: path, type, bytes before, bytes after; largest first."""
    before = {m.path: m.own.saved_bytes for m in comparison.before.by_module}
    after = {m.path: m.own.saved_bytes for m in comparison.after.by_module}
    types = {m.path: m.type for m in (*comparison.before.by_module, *comparison.after.by_module)}
    rows = [(path, kind, before.get(path, 0), after.get(path, 0)) for path, kind in types.items()]
    changed = [row for row in rows if row[2] != row[3]]
    return sorted(changed, key=lambda row: abs(row[3] - row[2]), reverse=True)[:limit]


@dataclass(frozen=True)
class SweepTable:
    """A sweep as ``cells[row][column]``, labelled in ``unit`` (GB, or MB where all are small)."""

    row_axis: str  # "" for a sweep over one axis
    column_axis: str
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    cells: tuple[tuple[SweepPoint | None, ...], ...]
    unit: str
    scale: int
    limit_bytes: int | None
    smallest: int  # of the peaks within the limit, as is the largest
    largest: int

    def over(self, size: int) -> bool:
        return self.limit_bytes is not None and size > self.limit_bytes

    def share(self, size: int) -> float:
        """Place a peak between the smallest (0) and the largest (1) within the limit."""
        return min(1.0, (size - self.smallest) / max(self.largest - self.smallest, 1))

    def label(self, size: int) -> str:
        """A size in the grid's unit, without it."""
        return f"{size / self.scale:.{2 if size < 10 * self.scale else 1}f}"


def grid(sweep: Sweep, size: Callable[[SweepPoint], int] = attrgetter("peak_bytes")) -> SweepTable:
    """Lay out a sweep over one or two axes; the last axis runs along the columns."""
    *first, (column_axis, columns) = sweep.axes.items()
    row_axis, rows = first[0] if first else ("", (0,))
    by_point = {(cell.point.get(row_axis, 0), cell.point[column_axis]): cell for cell in sweep.cells}
    peaks = [size(cell) for cell in sweep.cells]
    within = [p for p in peaks if sweep.limit_bytes is None or p <= sweep.limit_bytes] or peaks
    unit, scale = ("GB", 10**9) if max(peaks, default=0) >= 10**8 else ("MB", 10**6)
    cells = tuple(tuple(by_point.get((row, column)) for column in columns) for row in rows)
    smallest, largest = min(within, default=0), max(within, default=0)
    return SweepTable(
        row_axis, column_axis, rows, columns, cells, unit, scale, sweep.limit_bytes, smallest, largest
    )  # fmt: skip


def short_op(name: str) -> str:
    """An op's name without PyTorch's own namespace and the overload.

    >>> short_op("aten.convolution.default"), short_op("lowtide.fewbit.default")
    ('convolution', 'lowtide.fewbit')
    """
    namespace, dot, rest = name.replace("::", ".").partition(".")
    if not dot:
        return name
    op = rest.partition(".")[0]
    return op if namespace == "aten" else f"{namespace}.{op}"


def short_source(source: str) -> str:
    """A source's last folder, file and line.

    >>> short_source("/home/me/models/resnet.py:99"), short_source("train.py:3")
    ('models/resnet.py:99', 'train.py:3')
    """
    return "/".join(part for part in PurePath(source).parts[-2:] if part != "/")


def format_shape(shape: Sequence[int]) -> str:
    """A shape as people write it.

    >>> format_shape((8, 512, 768)), format_shape(())
    ('8×512×768', 'scalar')
    """
    return "×".join(map(str, shape)) or "scalar"
