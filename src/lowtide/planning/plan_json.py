"""Write plans as JSON and read them back. Reading checks everything, and raises ``PlanError`` with the reason."""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from lowtide.chains import StageChoice
from lowtide.errors import PlanError
from lowtide.fingerprint import Fingerprint
from lowtide.planning.candidate import Permission
from lowtide.planning.plan import Baseline, Choice, Plan, PlannedStage, ProgramChoice
from lowtide.planning.programs.program_json import program_from_json, program_to_json
from lowtide.techniques.registry import find_technique
from lowtide.techniques.technique import Fidelity, Option
from lowtide.version import __version__

PLAN_VERSION = 5
_LARGEST = 2**63  # of whole numbers: no device has as many bytes


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """A plan as JSON-ready data; unknown seconds are null."""
    data = {
        "version": PLAN_VERSION,
        "lowtide": __version__,
        "engine": plan.engine,
        "fidelity": plan.fidelity,
        "budget_bytes": plan.budget_bytes,
        "peak_bytes": plan.peak_bytes,
        "storage_peak_bytes": plan.storage_peak_bytes,
        "seconds": plan.seconds,
        "seconds_source": plan.seconds_source,
        "baseline": asdict(plan.baseline),
        "choices": [asdict(choice) for choice in plan.choices],
        "fingerprint": asdict(plan.fingerprint),
        "device": plan.device,
        "notes": plan.notes,
        "program": None if plan.program is None else _program_to_json(plan.program),
        "permission": {
            "loosest": plan.permission.loosest,
            "names": sorted(plan.permission.names),
            "forbidden": sorted(plan.permission.forbidden),
        },
    }
    return _null_for_nan(data)


def plan_from_json(data: str | Mapping[str, Any]) -> Plan:
    """Read a plan from data or text."""
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
        return _plan(data)
    except KeyError as error:
        raise PlanError(f"The plan has no field {error}", hint="Plan again.") from error
    except (TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise PlanError(f"The plan is malformed: {error}", hint="Plan again.") from error


def _program_to_json(choice: ProgramChoice) -> dict[str, Any]:
    return {
        "solver": choice.solver,
        "lowering": choice.lowering,
        "graph": choice.graph,
        "room_bytes": choice.room_bytes,
        "ops_again": choice.ops_again,
        "seconds": choice.seconds,
        "fidelity": choice.fidelity,
        "bound": choice.bound,
        "why": choice.why,
        "stages": [{"outline": stage.outline, **asdict(stage.choice)} for stage in choice.stages],
        "instructions": program_to_json(choice.instructions),
    }


def _plan(data: Mapping[str, Any]) -> Plan:
    return Plan(
        engine=_text(data["engine"]),
        budget_bytes=_size(data, "budget_bytes"),
        peak_bytes=_size(data, "peak_bytes"),
        storage_peak_bytes=_size(data, "storage_peak_bytes"),
        seconds=_seconds(data),
        seconds_source=_seconds_source(data["seconds_source"]),
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
        program=None if data["program"] is None else _program(data["program"]),
        permission=Permission(
            Fidelity(data["permission"]["loosest"]),
            frozenset(_texts(data["permission"]["names"])),
            frozenset(_texts(data["permission"]["forbidden"])),
        ),
    )


def _program(data: Mapping[str, Any]) -> ProgramChoice:
    return ProgramChoice(
        instructions=program_from_json(data["instructions"]),
        graph=_text(data["graph"]),
        lowering=_text(data["lowering"]),
        solver=_text(data["solver"]),
        room_bytes=_size(data, "room_bytes"),
        seconds=_seconds(data),
        fidelity=Fidelity(data["fidelity"]),
        why=_texts(data["why"]),
        stages=tuple(map(_stage, data["stages"])),
        bound=_seconds(data, "bound"),
    )


def _stage(data: Mapping[str, Any]) -> PlannedStage:
    sizes = ("stage", "runs", "saved_bytes", "peak_bytes_if_kept", "cheap_bytes")
    again = _seconds(data, "seconds_again")
    return PlannedStage(
        _text(data["outline"]), StageChoice(**{key: _size(data, key) for key in sizes}, seconds_again=again)
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


def _seconds(data: Mapping[str, Any], key: str = "seconds") -> float:
    value = data[key]
    if value is None:
        return math.nan
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < _LARGEST:
        raise ValueError(f"{key} is {_shown(value)}, not a number")
    return float(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{_shown(value)} is not text")
    return value


def _texts(values: Any) -> tuple[str, ...]:
    if not isinstance(values, list | tuple):
        raise TypeError(f"{_shown(values)} is not a list")
    return tuple(map(_text, values))


def _seconds_source(value: Any) -> Any:
    if value not in (known := ("measured", "modelled", "none")):
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
