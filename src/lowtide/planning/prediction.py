"""Predict a step under options or a plan: estimate it from prices, or trace it on fake tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import get_args

import numpy as np

from lowtide.errors import PlanError, TraceError
from lowtide.planning.engine import ENGINES
from lowtide.planning.plan import Plan, PlannedStage
from lowtide.planning.programs.program import Program
from lowtide.profiling import Comparison, Profile, profile
from lowtide.profiling.kernels import Workspaces
from lowtide.techniques.registry import find_technique
from lowtide.techniques.technique import Kind, Option, Price, Technique, loss_for_peaks
from lowtide.tracing.graph import Graph
from lowtide.tracing.snapshot import unchanged
from lowtide.undo import Applied, Undo
from lowtide.workload import Workload


def estimate_peak(graph: Graph, prices: Iterable[Price]) -> int:
    """Estimate the allocated peak of a traced step under some prices, by their live intervals."""
    change = np.zeros(len(graph.ops) + 1, np.int64)
    unit = graph.granularity
    for price in prices:
        for sign, intervals in ((1, price.added), (-1, price.removed)):
            for interval in intervals:
                size = sign * -(-interval.bytes // unit) * unit
                change[interval.birth] += size
                change[interval.death] -= size
    return int(max(graph.live_bytes(allocated=True) + np.cumsum(change)[:-1], default=0))


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
    after = ENGINES[plan.engine].predict(work, plan, baseline)
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
