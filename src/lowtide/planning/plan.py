"""A plan: changes of a step that make it fit a budget, with prediction and reasons. Plain data."""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from lowtide.chains import Chain, Schedule, simulate
from lowtide.errors import PlanError
from lowtide.fingerprint import Fingerprint
from lowtide.sizes import format_seconds, format_size
from lowtide.techniques.registry import find_technique
from lowtide.techniques.technique import Fidelity, Option
from lowtide.version import __version__
from lowtide.workload import Workload, check_workload

PLAN_VERSION = 4
_LARGEST = 2**63  # of whole numbers: no device has as many bytes


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


@dataclass(frozen=True, slots=True)
class ProgramChoice:
    """A schedule for the graph engine, over the stages of the step's joint graph, with reasons.

    ``schedule`` is as ``lowtide.chains`` prints it: "F1c, F2n, F3e, B3, …".
    """

    schedule: str
    graph: str  # digest of the joint graph
    room_bytes: int  # that a program may take beside what stays: for other graphs of the same shapes
    ops_again: int
    seconds: float  # that the step takes longer
    fidelity: Fidelity
    why: tuple[str, ...]  # by stage, for those that matter

    def __str__(self) -> str:
        stages = self.schedule.count("B")
        return f"recompute {self.ops_again} ops, by a schedule of {stages} stages on the graph engine"


@dataclass(frozen=True)
class Plan:
    """A step that fits a budget. ``apply`` runs it, ``explain()`` describes it, ``to_json()`` stores it.

    ``peak_bytes`` is the allocated peak that budgets are about, ``storage_peak_bytes`` the exact one of
    storages.
    """

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
    program: ProgramChoice | None = None  # on the graph engine; otherwise the step runs eagerly

    @property
    def engine(self) -> Literal["eager", "graph"]:
        """Name of the engine that runs the step."""
        return "eager" if self.program is None else "graph"

    @property
    def fidelity(self) -> Fidelity:
        """The loosest class among the choices; bitwise where nothing is changed."""
        programs = [] if self.program is None else [self.program.fidelity]
        return max([Fidelity.BITWISE, *programs, *(choice.fidelity for choice in self.choices)])

    @property
    def options(self) -> tuple[Option, ...]:
        """Options to apply, in order."""
        return tuple(choice.option for choice in self.choices)

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
        given = device or work.device.type
        if given != "meta" and (given == "cpu") != (self.device == "cpu"):
            raise PlanError(
                f"The plan is for another device: {self.device} was planned, {given} is given",
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
        if not self.choices and self.program is None:
            lines.append("  the plain step fits: nothing is changed")
        for choice in self.choices:
            lines.append(f"  {choice.option}")
            saved = format_size(choice.saved_bytes)
            lines.append(f"    saves {saved} at the peak, takes {_difference(choice.seconds)}. {choice.why}")
        if self.program is not None:
            saved = format_size(base.peak_bytes - self.peak_bytes)
            lines.append(f"  {self.program}")
            lines.append(f"    saves {saved} at the peak, takes {_difference(self.program.seconds)}.")
            lines += [f"    {line}" for line in self.program.why]
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])

    def __str__(self) -> str:
        return self.explain()

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON-ready data; ``Plan.from_json`` reads it back."""
        data = {
            "version": PLAN_VERSION,
            "lowtide": __version__,
            "engine": self.engine,
            "fidelity": self.fidelity.value,
            **asdict(self),
        }
        return _null_for_nan(data)

    @classmethod
    def from_json(cls, data: str | Mapping[str, Any]) -> Plan:
        """Read a plan from ``to_json()``'s data, or from that as text; refuse what is not one and say why."""
        if isinstance(data, str):
            try:
                data = json.loads(data)
            except (ValueError, RecursionError) as error:
                raise PlanError(f"The plan is not JSON: {error}") from error
        if not isinstance(data, Mapping):
            raise PlanError(f"A plan is a JSON object, not a {type(data).__name__}")
        if data.get("version") != PLAN_VERSION:
            raise PlanError(
                f"The plan has version {_shown(data.get('version'))}, and this lowtide reads {PLAN_VERSION}",
                hint="Plan again with this lowtide.",
            )
        try:
            return _read(data)
        except KeyError as error:
            raise PlanError(f"The plan has no field {error}", hint="Plan again.") from error
        except (TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
            raise PlanError(f"The plan is malformed: {error}", hint="Plan again.") from error


def check_plan(plan: object, work: object, *, call: str) -> None:
    """Raise an error that shows the ``call``, unless these are a plan and its own step."""
    if not isinstance(plan, Plan):
        raise PlanError(
            f"The plan is a {type(plan).__name__}, not a Plan",
            hint=f"Write {call} with what lowtide.plan or Plan.from_json returned.",
        )
    plan.check(check_workload(work, call=call))


def _read(data: Mapping[str, Any]) -> Plan:
    return Plan(
        budget_bytes=_size(data, "budget_bytes"),
        peak_bytes=_size(data, "peak_bytes"),
        storage_peak_bytes=_size(data, "storage_peak_bytes"),
        seconds=_seconds(data),
        seconds_source=_one_of(data["seconds_source"], ("measured", "modelled", "none")),
        baseline=Baseline(
            _size(data["baseline"], "peak_bytes"),
            _size(data["baseline"], "storage_peak_bytes"),
            _seconds(data["baseline"]),
        ),
        choices=tuple(
            Choice(
                option=_option(choice["option"]),
                fidelity=Fidelity(choice["fidelity"]),
                saved_bytes=_whole(choice, "saved_bytes"),
                seconds=_seconds(choice),
                why=_text(choice["why"]),
            )
            for choice in data["choices"]
        ),
        fingerprint=Fingerprint(**{key: _text(value) for key, value in data["fingerprint"].items()}),
        device=_text(data["device"]),
        notes=_texts(data["notes"]),
        program=None if data["program"] is None else _recomputation(data["program"]),
    )


def _recomputation(data: Mapping[str, Any]) -> ProgramChoice:
    schedule = Schedule.parse(_text(data["schedule"]))
    stages = sum(op.kind == "b" for op in schedule.operations)
    if not stages:
        raise ValueError("its schedule has no backward pass")
    simulate(Chain.uniform(stages), schedule)  # raises where an operation cannot run
    return ProgramChoice(
        str(schedule),
        _text(data["graph"]),
        _size(data, "room_bytes"),
        _size(data, "ops_again"),
        _seconds(data),
        Fidelity(data["fidelity"]),
        _texts(data["why"]),
    )


def _option(data: Mapping[str, Any]) -> Option:
    name = _text(data["technique"])
    return Option(name, _texts(data["site"]), find_technique(name).config.from_json(data["config"]))


def _size(data: Mapping[str, Any], key: str) -> int:
    value = _whole(data, key)
    if value < 0:
        raise ValueError(f"{key} is {value}, not a whole number")
    return value


def _whole(data: Mapping[str, Any], key: str) -> int:
    value = data[key]
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) >= _LARGEST:
        raise ValueError(f"{key} is {_shown(value)}, not a whole number of bytes")
    return value


def _shown(value: Any) -> str:
    """Shorten a value for an error; Python refuses to print the largest integers."""
    if isinstance(value, int) and abs(value) >= _LARGEST:
        return "an integer beyond 64 bits"
    return reprlib.repr(value)


def _seconds(data: Mapping[str, Any]) -> float:
    value = data["seconds"]
    if value is None:
        return math.nan
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < _LARGEST:
        raise ValueError(f"seconds is {_shown(value)}, not a number")
    return float(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{_shown(value)} is not text")
    return value


def _texts(values: Any) -> tuple[str, ...]:
    if not isinstance(values, list | tuple):
        raise TypeError(f"{_shown(values)} is not a list")
    return tuple(map(_text, values))


def _one_of(value: Any, known: Sequence[Any]) -> Any:
    if value not in known:
        raise ValueError(f"{_shown(value)} is none of {', '.join(known)}")
    return value


def _null_for_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _null_for_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_null_for_nan(item) for item in value]
    if isinstance(value, Fidelity):
        return value.value
    return None if isinstance(value, float) and math.isnan(value) else value


def _difference(seconds: float) -> str:
    """Seconds more or less than the plain step.

    >>> _difference(0.002), _difference(-0.002)
    ('2.00 ms longer', '2.00 ms less')
    """
    return f"{_duration(abs(seconds))} {'less' if seconds < 0 else 'longer'}"


def _duration(seconds: float) -> str:
    return "unknown time" if math.isnan(seconds) else format_seconds(seconds)
