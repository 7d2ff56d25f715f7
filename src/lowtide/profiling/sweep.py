"""A grid of predicted peaks over batch size, sequence length or anything else a workload is made from."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lowtide.errors import BudgetError, WorkloadError
from lowtide.profiling.profile import Profile
from lowtide.profiling.profiler import profile
from lowtide.sizes import format_size, parse_size
from lowtide.tracing.graph import Category
from lowtide.workload import Workload


@dataclass(frozen=True, slots=True)
class Cell:
    """One point of a sweep."""

    point: dict[str, int]
    peak_bytes: int
    storage_peak_bytes: int
    saved_bytes: int
    by_category: dict[Category, int]


@dataclass(frozen=True)
class Sweep:
    """Predicted peaks over one or two axes."""

    name: str
    hardware: str
    axes: dict[str, tuple[int, ...]]
    cells: tuple[Cell, ...]
    limit_bytes: int | None = None

    def to_json(self) -> dict[str, Any]:
        """The sweep as JSON-ready data."""
        return {
            "version": 1,
            "name": self.name,
            "hardware": self.hardware,
            "axes": {axis: list(values) for axis, values in self.axes.items()},
            "limit_bytes": self.limit_bytes,
            "cells": [
                {
                    "point": cell.point,
                    "peak_bytes": cell.peak_bytes,
                    "storage_peak_bytes": cell.storage_peak_bytes,
                    "saved_bytes": cell.saved_bytes,
                    "by_category": cell.by_category,
                    "fits": self.limit_bytes is None or cell.peak_bytes <= self.limit_bytes,
                }
                for cell in self.cells
            ],
        }


def sweep(
    make_workload: Callable[..., Workload],
    *,
    device: str | None = None,
    limit: int | str | None = None,
    progress: Callable[[int, int], None] | None = None,
    **axes: Sequence[int],
) -> Sweep:
    """Predict the peak for every combination of the axes, without running anything.

    ``make_workload(batch=8, seq=512)`` builds the step for one point; built on the meta device it takes no memory.
    ``progress(done, total)`` is called after each cell.
    """
    if not axes or len(axes) > 2 or any(len(values) == 0 for values in axes.values()):
        raise WorkloadError(
            "A sweep has one or two axes with values", hint="Write sweep(make, batch=[8, 16], seq=[512])."
        )
    points = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    cells: list[Cell] = []
    last: Profile | None = None
    for point in points:
        last = profile(make_workload(**point), fake=True, device=device)
        cells.append(Cell(point, last.peak_bytes, last.storage_peak_bytes, last.saved_bytes, dict(last.by_category)))
        if progress is not None:
            progress(len(cells), len(points))
    assert last is not None
    return Sweep(
        last.name,
        last.hardware,
        {axis: tuple(values) for axis, values in axes.items()},
        tuple(cells),
        None if limit is None else parse_size(limit),
    )


def max_batch(
    make_workload: Callable[..., Workload], limit: int | str, *, device: str | None = None, most: int = 2**20
) -> int:
    """The largest batch whose predicted peak fits a limit: doubling, then bisection."""
    limit_bytes = parse_size(limit)

    def fits(batch: int) -> bool:
        return profile(make_workload(batch=batch), fake=True, device=device).peak_bytes <= limit_bytes

    low = 1
    try:
        enough = fits(1)
    except ValueError:  # batch norm over single values wants two samples
        low, enough = 2, fits(2)
    if not enough:
        peak = profile(make_workload(batch=low), fake=True, device=device).peak_bytes
        raise BudgetError(
            f"Not even a batch of {low} fits {format_size(limit_bytes)}: it needs {format_size(peak)}",
            hint="Raise the limit, or plan the step for it: lowtide plan --budget.",
        )
    while low < most and fits(low * 2):
        low *= 2
    high = low * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
