"""Programs of the graph engine by shape: the plan's own, and others for other graphs of the step."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from lowtide.engines.plain_step import PlainStep
from lowtide.engines.shapes import Bounds, modes_of, predict_shape, signature
from lowtide.engines.step_difference import ModelSetting, step_difference
from lowtide.errors import TraceError
from lowtide.fingerprint import batch_shapes
from lowtide.planning.graph_candidates import GraphCandidates
from lowtide.planning.lowering import LOWERINGS
from lowtide.planning.plan import Plan, ProgramChoice
from lowtide.planning.programs.program import Program, simulate
from lowtide.planning.programs.program_profile import node_seconds
from lowtide.planning.programs.transfer import check_runs_on, transferred
from lowtide.planning.solvers.solver import fastest_program
from lowtide.sizes import format_size
from lowtide.techniques.technique import Fidelity
from lowtide.tracing.capture.joint import Joint
from lowtide.tracing.capture.loss import capture_joint
from lowtide.workload import Workload

Planner = Callable[[Joint], Program]


class PlannerFor(Protocol):
    """Makes the planner for batches of one shape, whose joint graph may be known already."""

    def __call__(self, batch: Any, joint: Joint | None = None, /) -> Planner: ...


class OtherShapes:
    """The plan's own program for batches like the planned one; for others the fastest that fits the same budget.

    A program holds for every batch that is no larger in any dimension than the one it was made for.
    """

    def __init__(self, plan: Plan, work: Workload, planned: ProgramChoice, plain: PlainStep) -> None:
        self.plan, self.work, self.planned, self._plain = plan, work, planned, plain
        self._bounds = Bounds[ProgramChoice]([(signature(work.batch), planned)])
        self._modes = modes_of(work)
        self._setting = ModelSetting.of(work.model)

    def __call__(self, batch: Any, joint: Joint | None = None) -> Planner:
        """The planner for batches of this shape. ``joint`` saves a capture.

        Raises ``TraceError`` for a joint graph that has not the ops of the planned one.
        """
        if batch_shapes(batch) == self.plan.fingerprint.batch:
            return lambda joint: self._own_program(joint, self.planned)
        shape, modes = signature(batch), modes_of(self.work)
        if modes != self._modes:  # another step: its peaks are not bounded by the planned one's
            self._bounds, self._modes = Bounds[ProgramChoice](), modes
        choice = self._bounds.fit(shape)
        if joint is not None:
            form = LOWERINGS[self.planned.lowering].form(joint)
            if choice is not None and transferred(choice.instructions, form) is None:
                raise TraceError("Captured with symbols for sizes, the step has other ops than the planned one")
        if choice is not None:
            return lambda joint: self._smaller_program(joint, choice)
        if (smallest := self._bounds.excess(shape)) is not None:
            self._warn_too_large(batch, "more than that of a smaller batch, which is too much already")
            return lambda joint: self._smaller_program(joint, smallest, must_fit=False)
        try:
            choice, fits = self._plan_again(batch, joint)
        except TraceError:  # a prediction has no values to look at
            shapes = f"the batch is {batch_shapes(batch)}, and {self.plan.fingerprint.batch} was planned"
            return lambda joint: self._other_program(joint, self.planned, shapes)
        self._bounds.note(shape, choice, fits=fits)
        return lambda joint: self._own_program(joint, choice)

    def is_planned(self, joint: Joint) -> bool:
        """Tell whether the plan's program was written for a captured graph."""
        return LOWERINGS[self.planned.lowering].form(joint).digest == self.planned.graph

    def _plan_again(self, batch: Any, joint: Joint | None) -> tuple[ProgramChoice, bool]:
        """The fastest program for another batch that the plan's user permits, and whether it fits.

        The step is predicted, with each new kernel measured alone. The plan's options are priced, so they do not act.
        """
        plan, budget = self.plan, self.plan.budget_bytes
        with self._plain(batch) as work:
            plain = predict_shape(work, batch, device=plan.device)
        joint = joint or capture_joint(replace(self.work, batch=batch))
        candidates = GraphCandidates(joint, plain, earned=min(self.planned.fidelity, Fidelity.ROUNDOFF))
        lowering = LOWERINGS[self.planned.lowering]
        fastest = candidates.fastest(plan.engine, lowering, budget, plan.options, permitted=plan.permission)
        if fastest is None:
            raise TraceError(f"The {self.planned.lowering} lowering runs no program of this batch")
        fits = fastest.peak_bytes <= budget
        if not fits:
            self._warn_too_large(batch, format_size(fastest.peak_bytes))
        return candidates.choice(fastest, budget if fits else fastest.peak_bytes), fits

    def _warn_too_large(self, batch: Any, takes: str) -> None:
        warnings.warn(
            f"A batch of {batch_shapes(batch)} does not fit the budget of {format_size(self.plan.budget_bytes)}, which "
            f"was planned for {self.plan.fingerprint.batch}: the smallest program takes {takes}",
            RuntimeWarning,
            stacklevel=3,
        )

    def _own_program(self, joint: Joint, choice: ProgramChoice) -> Program:
        """The chosen program on the graph that it was made for."""
        if joint.digest != choice.graph:
            return self._other_program(joint, choice, self._difference(joint))
        check_runs_on(choice.instructions, joint)
        return choice.instructions

    def _smaller_program(self, joint: Joint, choice: ProgramChoice, *, must_fit: bool = True) -> Program:
        """The chosen program on the graph of a smaller batch, whose results and peak are smaller."""
        program = transferred(choice.instructions, joint)
        if program is not None and (not must_fit or simulate(program).peak_bytes <= choice.room_bytes):
            return program
        return self._other_program(joint, choice, self._difference(joint))

    def _other_program(self, joint: Joint, choice: ProgramChoice, why: str) -> Program:
        """A program of another graph, whose kernels were not measured."""
        warnings.warn(
            f"The step is not the one that was planned: {why}. It is planned anew by the bytes of its results alone, "
            f"and {format_size(self.plan.budget_bytes)} are not promised for it",
            RuntimeWarning,
            stacklevel=2,
        )
        seconds = node_seconds(joint, self.plan.device)
        return fastest_program(joint, choice.room_bytes, seconds=seconds, or_smallest=True)

    def _difference(self, joint: Joint) -> str:
        return step_difference(joint, self.work, self._setting)
