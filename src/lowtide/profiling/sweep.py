"""A grid of predicted peaks over batch size, sequence length or another argument of a workload."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from lowtide.errors import BudgetError, LowtideError, WorkloadError
from lowtide.profiling.profile import Profile, json_ready
from lowtide.profiling.profiler import profile
from lowtide.sizes import format_size, parse_size
from lowtide.tracing.graph import Category
from lowtide.workload import Workload

Point: TypeAlias = "tuple[int, ...]"


@dataclass(frozen=True, slots=True)
class SweepPoint:
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
    cells: tuple[SweepPoint, ...]
    traced: int  # points that were traced; the others were worked out from them, and one traced to prove it
    limit_bytes: int | None = None

    def to_json(self) -> dict[str, Any]:
        """The sweep as JSON-ready data."""
        data: dict[str, Any] = {"version": 1, **json_ready(self)}
        for cell in data["cells"]:
            cell["fits"] = self.limit_bytes is None or cell["peak_bytes"] <= self.limit_bytes
        return data


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
    grid = {axis: tuple(values) for axis, values in axes.items()}
    profiles = _GridProfiles(make_workload, grid, device, progress)
    by_point = profiles.all()
    first = next(iter(by_point.values()))
    cells = [
        SweepPoint(
            dict(zip(grid, point, strict=True)), p.peak_bytes, p.storage_peak_bytes, p.saved_bytes, p.by_category
        )
        for point, p in by_point.items()
    ]
    limit_bytes = None if limit is None else parse_size(limit)
    return Sweep(first.name, first.hardware, grid, tuple(cells), profiles.traced, limit_bytes)


class _GridProfiles:
    """The profiles of a grid, most of them worked out from a few.

    Storages grow with a batch or a sequence as polynomials of low degree, and the ops stay the same. So three values
    of each axis are traced, every storage's size is interpolated, and one more point is traced to prove it. Where the
    graph changes with the sizes, or the proof fails, every point is traced.
    """

    def __init__(
        self,
        make_workload: Callable[..., Workload],
        grid: dict[str, tuple[int, ...]],
        device: str | None,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self._make = make_workload
        self._grid = grid
        self._device = device
        self._points = list(itertools.product(*grid.values()))
        self._progress = progress
        self._profiles: dict[Point, Profile] = {}
        self.traced = 0

    def all(self) -> dict[Point, Profile]:
        nodes = [_nodes(values) for values in self._grid.values()]
        samples = list(itertools.product(*nodes))
        others = [point for point in self._points if point not in set(samples)]
        if len(others) > 1:
            basis = [self._trace(point) for point in samples]
            proof = max(others, key=math.prod)
            if _alike(basis) and _same_sizes(self._trace(proof), _interpolated(basis, nodes, proof)):
                for point in others:
                    self._add(point, self._profiles.get(point) or _interpolated(basis, nodes, point))
        for point in self._points:
            self._trace(point)
        return {point: self._profiles[point] for point in self._points}

    def _trace(self, point: Point) -> Profile:
        if point not in self._profiles:
            self.traced += 1
            sizes = dict(zip(self._grid, point, strict=True))
            try:
                self._add(point, profile(self._make(**sizes), fake=True, device=self._device))
            except LowtideError:
                raise
            except ValueError as error:
                where = ", ".join(f"{axis}={value}" for axis, value in sizes.items())
                raise WorkloadError(f"There is no such step: {error}", where=where, hint="Leave it out.") from error
        return self._profiles[point]

    def _add(self, point: Point, profiled: Profile) -> None:
        self._profiles[point] = profiled
        if self._progress is not None:
            self._progress(len(self._profiles), len(self._points))


def _nodes(values: tuple[int, ...]) -> tuple[int, ...]:
    """The values of an axis that are traced: enough for a parabola."""
    ordered = sorted(set(values))
    return tuple(ordered) if len(ordered) <= 3 else (ordered[0], ordered[len(ordered) // 2], ordered[-1])


def _alike(profiles: Sequence[Profile]) -> bool:
    """Tell whether ops and lifetimes are the same, and no op has a workspace, which follows rules of its own."""

    def shape(p: Profile) -> object:
        names = tuple(op.name for op in p.graph.ops)
        return names, tuple((s.category, s.device, s.birth, s.death) for s in p.graph.storages)

    first = shape(profiles[0])
    return all(shape(p) == first and not any(op.workspace_bytes for op in p.graph.ops) for p in profiles)


def _interpolated(basis: Sequence[Profile], nodes: Sequence[tuple[int, ...]], point: Point) -> Profile:
    """The profile at a point: every storage's size by Lagrange's formula over the traced ones."""
    weights = np.ones(1)
    for axis, value in zip(nodes, point, strict=True):
        factors = [math.prod((value - other) / (node - other) for other in axis if other != node) for node in axis]
        weights = np.outer(weights, factors).ravel()
    sizes = weights @ np.array([[s.bytes for s in p.graph.storages] for p in basis], dtype=np.float64)
    graph = basis[0].graph
    storages = tuple(replace(s, bytes=round(size)) for s, size in zip(graph.storages, sizes, strict=True))
    return replace(basis[0], graph=replace(graph, storages=storages))


def _same_sizes(left: Profile, right: Profile) -> bool:
    return [s.bytes for s in left.graph.storages] == [s.bytes for s in right.graph.storages]


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
            smallest_bytes=peak,
        )
    while low < most and fits(low * 2):
        low *= 2
    high = low * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
