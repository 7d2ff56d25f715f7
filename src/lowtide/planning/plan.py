"""A plan: changes of a step that make it fit a budget, with prediction and reasons. Plain data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from lowtide.chains import StageChoice
from lowtide.errors import PlanError
from lowtide.fingerprint import Fingerprint
from lowtide.planning.candidate import Permission
from lowtide.planning.programs.program import Kind, Program
from lowtide.registry import PLAIN_ENGINE
from lowtide.sizes import format_seconds, format_size
from lowtide.techniques.technique import Fidelity, Option
from lowtide.workload import Workload, check_workload


@dataclass(frozen=True, slots=True)
class Baseline:
    """The plain step."""

    peak_bytes: int
    storage_peak_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Choice:
    """A chosen option with its savings, its cost and the reason for it."""

    option: Option
    fidelity: Fidelity
    saved_bytes: int  # of the allocated peak
    seconds: float  # that the step takes longer
    why: str


class PlannedStage(NamedTuple):
    """One part of a step, named by its modules and heavy ops, with its saved values: kept or recomputed."""

    outline: str
    choice: StageChoice


@dataclass(frozen=True, slots=True)
class ProgramChoice:
    """The program of a step for an engine that captures the loss, with its cost and reasons."""

    instructions: Program = field(repr=False, hash=False)
    graph: str  # digest of the joint graph that they run on
    lowering: str  # turns them into code
    solver: str  # found them
    room_bytes: int  # that a program may take beside what stays: for other graphs of the same shapes
    seconds: float  # that the step takes longer
    fidelity: Fidelity
    why: tuple[str, ...]  # a line for each part of the step that matters
    stages: tuple[PlannedStage, ...] = ()
    bound: float = 0.0  # of a gradient's relative error, where the program is approximate
    is_recorded: bool = False  # as CUDA graphs, one for each pass, in a pool of memory that stays

    @property
    def ops_again(self) -> int:
        """Number of recomputed ops."""
        return self.instructions.recomputed

    def __str__(self) -> str:
        stages = f" in {len(self.stages)} stages" if self.stages else ""
        offloaded = sum(each.kind is Kind.OFFLOAD for each in self.instructions.forward)
        copies = f", offload {offloaded} values" if offloaded else ""
        encoded = sum(each.kind is Kind.ENCODE for each in self.instructions.forward)
        copies += f", encode {encoded} values" if encoded else ""
        recorded = ", recorded as CUDA graphs" if self.is_recorded else ""
        how = f"{self.solver} solver, {self.lowering} lowering{recorded}"
        return f"recompute {self.ops_again} ops{stages}{copies} ({how})"


@dataclass(frozen=True, slots=True)
class Changes:
    """Everything that a plan changes in a step."""

    options: tuple[Option, ...]
    program: ProgramChoice | None


@dataclass(frozen=True)
class Plan:
    """A step that fits a budget. ``apply`` runs it, ``explain()`` describes it, ``to_json()`` stores it.

    ``peak_bytes`` is the allocated peak that budgets are about, ``storage_peak_bytes`` the exact one of
    storages.
    """

    engine: str
    budget_bytes: int
    peak_bytes: int
    storage_peak_bytes: int
    seconds: float
    seconds_source: Literal["measured", "modelled", "none"]
    baseline: Baseline
    choices: tuple[Choice, ...]
    fingerprint: Fingerprint
    device: str
    notes: tuple[str, ...] = ()
    program: ProgramChoice | None = None  # for engines that run one
    permission: Permission = field(
        default_factory=Permission
    )  # of its user, which holds for batches of other shapes, too

    @property
    def is_plain(self) -> bool:
        """Tell whether the plain step fits, so that nothing is changed."""
        return self.engine == PLAIN_ENGINE and not self.choices

    @property
    def fidelity(self) -> Fidelity:
        """The loosest class among the choices; bitwise where nothing is changed."""
        programs = [] if self.program is None else [self.program.fidelity]
        return max([Fidelity.BITWISE, *programs, *(choice.fidelity for choice in self.choices)])

    @property
    def options(self) -> tuple[Option, ...]:
        """Options to apply, in order."""
        return tuple(choice.option for choice in self.choices)

    @property
    def changes(self) -> Changes:
        """The options and the program."""
        return Changes(self.options, self.program)

    def with_rounding(self, note: str) -> Plan:
        """The same plan with roundoff in place of bitwise, and a note that says why."""
        program = self.program and replace(self.program, fidelity=max(self.program.fidelity, Fidelity.ROUNDOFF))
        choices = (replace(choice, fidelity=max(choice.fidelity, Fidelity.ROUNDOFF)) for choice in self.choices)
        return replace(self, program=program, choices=tuple(choices), notes=(*self.notes, note))

    def check(self, work: Workload, *, device: str | None = None) -> None:
        """Raise a ``PlanError`` if the plan is of another step, or for another kind of ``device`` than the model's."""
        differs = self.fingerprint.difference(Fingerprint.of(work), was="planned")
        if differs:
            raise PlanError(f"The plan is of {differs}", hint="Plan again for this step.")
        actual = device or work.device.type
        if actual != "meta" and (actual == "cpu") != (self.device == "cpu"):
            raise PlanError(
                f"The plan is for another device: {self.device} was planned, {actual} is given",
                hint="Plan again for this device, or move the model and the batch.",
            )

    def explain(self) -> str:
        """Describe the plan: both steps, the choices, their cost and the reasons."""
        base = self.baseline
        lines = [
            f"budget {format_size(self.budget_bytes)} on {self.device}",
            f"  plain step    {format_size(base.peak_bytes):>10}  {_duration(base.seconds)}",
            f"  planned step  {format_size(self.peak_bytes):>10}  {_duration(self.seconds)}"
            f"  ({self.fidelity}; seconds {self.seconds_source})",
        ]
        if self.is_plain:
            lines.append("  the plain step fits: nothing is changed")
        for choice in self.choices:
            lines.append(f"  {choice.option}")
            saved = format_size(choice.saved_bytes)
            lines.append(f"    saves {saved} at the peak, takes {_difference(choice.seconds)}. {choice.why}")
        if self.program is not None:
            rest = base.peak_bytes - self.peak_bytes - sum(choice.saved_bytes for choice in self.choices)
            saved = format_size(max(0, rest))
            lines.append(f"  {self.program} on the {self.engine} engine")
            lines.append(f"    saves {saved} at the peak, takes {_difference(self.program.seconds)}.")
            lines += [f"    {line}" for line in self.program.why]
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])

    def __str__(self) -> str:
        return self.explain()

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON-ready data; ``Plan.from_json`` reads it back."""
        from lowtide.planning.plan_json import plan_to_json

        return plan_to_json(self)

    @classmethod
    def from_json(cls, data: str | Mapping[str, Any]) -> Plan:
        """Read a plan from ``to_json()``'s data, or from its text. Anything else is refused, with the reason."""
        from lowtide.planning.plan_json import plan_from_json

        return plan_from_json(data)


def check_plan(plan: object, work: object, *, call: str) -> None:
    """Raise an error that shows the ``call``, unless these are a plan and its own step."""
    if not isinstance(plan, Plan):
        raise PlanError(
            f"The plan is a {type(plan).__name__}, not a Plan",
            hint=f"Write {call} with what lowtide.plan or Plan.from_json returned.",
        )
    plan.check(check_workload(work, call=call))


def _difference(seconds: float) -> str:
    """Seconds more or less than the plain step.

    >>> _difference(0.002), _difference(-0.002)
    ('2.00 ms longer', '2.00 ms less')
    """
    return f"{_duration(abs(seconds))} {'less' if seconds < 0 else 'longer'}"


def _duration(seconds: float) -> str:
    return "unknown time" if math.isnan(seconds) else format_seconds(seconds)
