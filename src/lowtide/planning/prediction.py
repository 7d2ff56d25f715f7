"""Predict a step under options or a plan: estimate it from prices, or trace it on fake tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from lowtide.errors import PlanError, TraceError
from lowtide.planning.engine import ENGINES
from lowtide.planning.plan import Plan, PlannedStage
from lowtide.planning.programs.program import Program
from lowtide.profiling import Comparison, Profile, profile
from lowtide.profiling.kernels import Workspaces
from lowtide.techniques.registry import find_technique
from lowtide.techniques.technique import Interval, Kind, Option, Price, Technique, loss_for_peaks
from lowtide.tracing.graph import Category, Graph, Storage
from lowtide.tracing.snapshot import unchanged
from lowtide.undo import Applied, Undo
from lowtide.workload import Workload

_KEPT: tuple[Category, ...] = ("parameter", "buffer", "optimizer state", "input", "gradient")


def estimate_peak(graph: Graph, prices: Iterable[Price]) -> int:
    """Estimate the allocated peak of a traced step under some prices, by their live intervals."""
    return int(max(graph.live_bytes(allocated=True) + _change(graph, prices), default=0))


def kept_peak(graph: Graph, prices: Iterable[Price]) -> int:
    """Estimate the peak of what no recomputation frees: what stays between steps, gradients, the optimizer's step."""
    live, first = graph.live_bytes(*_KEPT, allocated=True), graph.phase_starts().get("optimizer", len(graph.ops))
    live[first:] = graph.live_bytes(allocated=True)[first:]
    return int(max(live + _change(graph, prices), default=0))


def step_peak(graph: Graph, prices: Iterable[Price]) -> int:
    """Estimate the peak of the optimizer's step alone; without an optimizer, what is alive at the end."""
    first = graph.phase_starts().get("optimizer", len(graph.ops) - 1)
    return int(max((graph.live_bytes(allocated=True) + _change(graph, prices))[first:], default=0))


def saved_by_each(graph: Graph, prices: Sequence[Price]) -> tuple[int, ...]:
    """Bytes by which the peak of a step would be higher without each of some options."""
    peak_bytes = estimate_peak(graph, prices)
    without = (estimate_peak(graph, [*prices[:place], *prices[place + 1 :]]) for place in range(len(prices)))
    return tuple(max(0, estimate - peak_bytes) for estimate in without)


def with_prices(graph: Graph, prices: Iterable[Price]) -> Graph:
    """A traced step as some prices change it, for an engine whose step no trace can follow.

    A removed interval is cut out of the storage that fits it best.
    """
    storages = _TrimmedStorages(graph)
    for price in prices:
        for interval in price.removed:
            storages.cut(interval)
        for interval in price.added:
            birth, death = interval.birth, interval.death
            device = graph.tensor_device
            storages.add(Storage(0, interval.bytes, device, "uint8", "temporary", birth, death, interval.why, "", ""))
    return replace(graph, storages=tuple(replace(s, id=place) for place, s in enumerate(storages.all)))


class _TrimmedStorages:
    """Storages of a graph, of which intervals are cut out."""

    def __init__(self, graph: Graph) -> None:
        self.all: list[Storage] = []
        self._device = graph.tensor_device
        self._spans = np.zeros((2 * len(graph.storages) + 1, 3), np.int64)  # birth, death, bytes; of those to cut
        for storage in graph.storages:
            self.add(storage)

    def add(self, storage: Storage, place: int | None = None) -> None:
        """Append a storage, or put it in the place of another."""
        if place is None:
            place = len(self.all)
            self.all.append(storage)
        self.all[place] = storage
        if place >= len(self._spans):
            self._spans = np.concatenate([self._spans, np.zeros_like(self._spans)])
        can_be_cut = storage.device == self._device and storage.category != "workspace"
        self._spans[place] = storage.birth, storage.death, storage.bytes if can_be_cut else -1

    def cut(self, interval: Interval) -> None:
        """Cut an interval out of the smallest storage that holds it, if any does."""
        births, deaths, sizes = self._spans[: len(self.all)].T
        (fitting,) = np.nonzero((births <= interval.birth) & (interval.death <= deaths) & (sizes >= interval.bytes))
        if not len(fitting):
            return
        place = int(fitting[np.lexsort((deaths[fitting] - births[fitting], sizes[fitting]))[0]])
        whole = self.all[place]
        rest = [
            replace(whole, bytes=size, birth=birth, death=death)
            for size, birth, death in (
                (whole.bytes, whole.birth, interval.birth),
                (whole.bytes - interval.bytes, interval.birth, interval.death),
                (whole.bytes, interval.death, whole.death),
            )
            if birth < death and size
        ] or [replace(whole, bytes=0)]
        self.add(rest[0], place)
        for each in rest[1:]:
            self.add(each)


def _change(graph: Graph, prices: Iterable[Price]) -> NDArray[np.int64]:
    change = np.zeros(len(graph.ops) + 1, np.int64)
    for price in prices:
        for sign, intervals in ((1, price.added), (-1, price.removed)):
            for interval in intervals:
                size = sign * graph.rounded(interval.bytes)
                change[interval.birth] += size
                change[interval.death] -= size
    return np.cumsum(change)[:-1]


def predict(work: Workload, options: Sequence[Option], baseline: Profile, *, only_peaks: bool = False) -> Profile:
    """Trace the step with these options on fake tensors, then restore the model.

    Workspaces come from the baseline's ops of the same signature, if those were measured. Every other op is measured
    alone. If fake tensors fail and the baseline was real, a real step is traced instead. ``only_peaks`` skips
    repetitions that change no peak.
    """
    is_measured = not baseline.graph.fake and baseline.workspace_source == "measured"
    known = {op.signature for op in baseline.graph.ops}
    measure = (lambda signature: signature not in known) if is_measured else False
    with unchanged(work, fake=True), apply_options(work, options) as applied:
        try:
            loss = loss_for_peaks(applied.work.loss) if only_peaks else applied.work.loss
            after = profile(replace(applied.work, loss=loss), fake=True, device=baseline.graph.device, measure=measure)
        except TraceError:
            if baseline.graph.fake:
                raise
            return profile(applied.work)
    if not is_measured:
        return after
    graph = _with_workspaces(after.graph, baseline.graph)
    return replace(after, graph=graph, workspace_source="measured")


@dataclass(frozen=True)
class Prediction:
    """A plan with its step before and after."""

    plan: Plan
    before: Profile
    after: Profile

    @property
    def program(self) -> Program | None:
        """The program of the plan, if it has one."""
        return self.plan.program and self.plan.program.instructions

    @property
    def stages(self) -> tuple[PlannedStage, ...]:
        """Each part of the step that the plan gives reasons for."""
        return self.plan.program.stages if self.plan.program else ()

    @property
    def comparison(self) -> Comparison:
        """Both steps, side by side."""
        return self.before.compare(self.after)


def predict_plan(work: Workload, plan: Plan, baseline: Profile) -> Prediction:
    """Predict a planned step without running it, then restore the model."""
    plan.check(work, device=baseline.graph.device)
    after = ENGINES[plan.engine].predict(work, plan.changes, baseline)
    return Prediction(plan, baseline, replace(after, name=f"{after.name}, planned"))


def apply_options(work: Workload, options: Sequence[Option]) -> Applied:
    """Apply options technique by technique, each to the step that the one before returned. If one fails, undo all.

    Rewrites and modules come first, then holds, then steps; else in the order given.
    """
    with Undo() as undo:
        for technique, mine in _by_technique(options):
            applied = technique.apply(work, mine)
            undo.add(applied)
            work = applied.work
        return Applied(work, undo.keep())


def _by_technique(options: Sequence[Option]) -> list[tuple[Technique, list[Option]]]:
    groups: dict[str, list[Option]] = {}
    for option in options:
        groups.setdefault(option.technique, []).append(option)
    known = {name: find_technique(name) for name in groups}
    for name in groups:
        for other, why in known[name].conflicts.items():
            if other in groups and other != name:
                raise PlanError(f"{name} and {other} cannot be in one plan: {why}", hint="Leave one of them out.")
    kinds = get_args(Kind)  # layers change first, then what they hold, then the step around them
    return sorted(((known[name], mine) for name, mine in groups.items()), key=lambda item: kinds.index(item[0].kind))


def _with_workspaces(graph: Graph, measured: Graph) -> Graph:
    """The graph with the workspaces that the same ops had in a real step."""
    known = Workspaces(measured, seen=((op.signature, op.workspace_bytes) for op in measured.ops), from_table=False)
    sizes = (known.get(op.signature) for op in graph.ops)
    ops = tuple(
        op if size is None else replace(op, workspace_bytes=size) for op, size in zip(graph.ops, sizes, strict=True)
    )
    seen = [s for s in graph.storages if s.category != "workspace"]
    workspaces = [replace(s, death=len(ops)) for s in measured.storages if s.category == "workspace"]
    storages = tuple(replace(s, id=i) for i, s in enumerate((*seen, *workspaces)))
    return replace(graph, ops=ops, storages=storages)
