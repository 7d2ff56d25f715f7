"""Programs for the planned graph and for graphs of other shapes."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from lowtide.chains import Schedule
from lowtide.compat.modules import hooks_of
from lowtide.engines.graph import Planner
from lowtide.engines.watch import ForwardWatch, Signature, is_within, modes_of, signature
from lowtide.errors import PlanError, TraceError
from lowtide.fingerprint import batch_shapes
from lowtide.planning.graph_candidates import GraphCandidates
from lowtide.planning.plan import Plan, ProgramChoice
from lowtide.planning.programs.program import Program, simulate
from lowtide.planning.programs.program_profile import node_seconds
from lowtide.planning.programs.stages import Stages
from lowtide.planning.programs.writer import program_of
from lowtide.planning.solvers.chain import fastest_program
from lowtide.profiling import profile
from lowtide.sizes import format_size
from lowtide.tracing.capture.joint import Joint
from lowtide.tracing.capture.loss import capture_joint
from lowtide.tracing.dense_parts import leaves
from lowtide.workload import Workload


class Replanner:
    """A plan's own program for batches like the planned one; for others the fastest that fits the same budget.

    A schedule holds for every batch that is no larger in any dimension than the one it was made for.
    """

    def __init__(self, plan: Plan, work: Workload) -> None:
        self.plan, self.work = plan, work
        self._chosen = [] if plan.program is None else [(signature(work.batch), plan.program)]
        self._too_large: list[tuple[Signature, ProgramChoice]] = []
        self._modes = modes_of(work)
        self._setting = _Setting.of(work.model)

    def __call__(self, batch: Any) -> Planner:
        """The planner for batches of this shape."""
        planned = self.plan.program
        if planned is not None and batch_shapes(batch) == self.plan.fingerprint.batch:
            return lambda joint: self._program(joint, planned)
        found, modes = signature(batch), modes_of(self.work)
        if modes != self._modes:  # another step: its own peaks are not bounded by the planned one's
            self._chosen, self._too_large, self._modes = [], [], modes
        for shape, chosen in self._chosen:
            if is_within(found, shape):
                return lambda joint: self._same_schedule(joint, chosen)
        for shape, smallest in self._too_large:
            if is_within(shape, found):
                self._warn_too_large(batch, "more than that of a smaller batch, which is too much already")
                return lambda joint: self._same_schedule(joint, smallest, must_fit=False)
        try:
            chosen, fits = self._plan_again(replace(self.work, batch=batch))
        except TraceError:  # a prediction has no values to look at
            if planned is None:
                raise
            shapes = f"the batch is {batch_shapes(batch)}, and {self.plan.fingerprint.batch} was planned"
            return lambda joint: self._other_program(joint, planned, shapes)
        (self._chosen if fits else self._too_large).append((found, chosen))
        return lambda joint: self._program(joint, chosen)

    def _plan_again(self, work: Workload) -> tuple[ProgramChoice, bool]:
        """The fastest schedule for another batch, and whether it fits.

        The step is predicted, with each new kernel measured alone.
        """
        budget = self.plan.budget_bytes
        plain = profile(work, fake=True, device=self.plan.device, measure=True)
        found = GraphCandidates(capture_joint(work), plain)
        peaks: dict[Schedule, int] = {}
        for schedule in found.worthwhile(budget):
            peaks[schedule] = found.profile(schedule).peak_bytes
            if peaks[schedule] <= budget:
                return found.chosen(schedule, peaks[schedule], budget), True
        smallest = min(peaks, key=lambda schedule: peaks[schedule])
        self._warn_too_large(work.batch, format_size(peaks[smallest]))
        return found.chosen(smallest, peaks[smallest], peaks[smallest]), False

    def _warn_too_large(self, batch: Any, takes: str) -> None:
        warnings.warn(
            f"A batch of {batch_shapes(batch)} does not fit the budget of {format_size(self.plan.budget_bytes)}, which "
            f"was planned for {self.plan.fingerprint.batch}: the smallest program takes {takes}",
            RuntimeWarning,
            stacklevel=3,
        )

    def _same_schedule(self, joint: Joint, chosen: ProgramChoice, *, must_fit: bool = True) -> Program:
        """Reuse the planned schedule for a smaller batch, whose results and peak are smaller."""
        stages, schedule = Stages(joint), Schedule.parse(chosen.schedule)
        if len(stages) == len(schedule.runs):
            program = program_of(stages, schedule)
            if not must_fit or simulate(program).peak_bytes <= chosen.room_bytes:
                return program
        return self._other_program(joint, chosen, self._difference(joint))

    def _other_program(self, joint: Joint, chosen: ProgramChoice, why: str) -> Program:
        """Plan another graph, whose kernels were not measured."""
        warnings.warn(
            f"The step is not the one that was planned: {why}. It is planned anew by the bytes of its results alone, "
            f"and {format_size(self.plan.budget_bytes)} are not promised for it",
            RuntimeWarning,
            stacklevel=2,
        )
        seconds = node_seconds(joint, self.plan.device)
        return fastest_program(joint, chosen.room_bytes, seconds=seconds, or_smallest=True)

    def _program(self, joint: Joint, chosen: ProgramChoice) -> Program:
        if joint.digest != chosen.graph:
            return self._other_program(joint, chosen, self._difference(joint))
        stages, schedule = Stages(joint), Schedule.parse(chosen.schedule)
        if len(stages) != len(schedule.runs):
            raise PlanError(
                f"The plan's schedule has {len(schedule.runs)} stages, and the step's graph {len(stages)}",
                hint="Plan again.",
            )
        return program_of(stages, schedule)

    def _difference(self, joint: Joint) -> str:
        """Name the reason why a batch of the planned shape runs another step."""
        found = self._setting.difference(_Setting.of(self.work.model))
        if found:
            return found
        if not self.work.autocast and _is_half(joint.forward) and not _is_half(joint.primals):
            return "it runs under an autocast that was not planned. Plan with Workload(..., autocast=...)"
        if joint.stored:
            return "the model stores tensors on itself, as in a first step"
        return "the loss runs other ops, as where a number or an attribute that it reads has changed"


@dataclass(frozen=True)
class _Setting:
    """Modes, hooks and trained parameters, by name: they decide which ops a model runs."""

    modes: Mapping[str, bool]
    hooks: Mapping[str, int]
    trained: Mapping[str, bool]

    @classmethod
    def of(cls, model: nn.Module) -> _Setting:
        modules = dict(model.named_modules())
        return cls(
            {name: module.training for name, module in modules.items()},
            {name: _hooks(module) for name, module in modules.items()},
            {name: parameter.requires_grad for name, parameter in model.named_parameters()},
        )

    def difference(self, now: _Setting) -> str:
        """Name the first module or parameter that differs; "" if none does."""
        if name := _first_unlike(self.modes, now.modes):
            mode = "training" if now.modes.get(name, now.modes[""]) else "evaluation"
            return f"{name} is in {mode} mode now"
        if name := _first_unlike(self.hooks, now.hooks):
            return f"{name} has other hooks"
        if name := _first_unlike(self.trained, now.trained):
            return f"{name} is {'trained' if now.trained.get(name) else 'frozen'} now"
        return ""


def _is_half(nodes: Iterable[fx.Node]) -> bool:
    """Whether a value is of a dtype that autocast computes in."""
    values = (value for node in nodes for value in leaves(node.meta.get("val")))
    return any(value.dtype in (torch.bfloat16, torch.float16) for value in values)


def _first_unlike(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    unlike = (name or "the model" for name in now if before.get(name) != now[name])
    return next(unlike, "")


def _hooks(module: nn.Module) -> int:
    return sum(not isinstance(hook, ForwardWatch) for hook in hooks_of(module))
