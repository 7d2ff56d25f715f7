"""Write plans as JSON and read them back. Reading checks everything, and raises ``PlanError`` with the reason."""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from types import UnionType
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

from lowtide.chains import StageChoice
from lowtide.errors import PlanError
from lowtide.planning.plan import Choice, Plan, PlannedStage
from lowtide.planning.programs.program import Program
from lowtide.planning.programs.program_json import program_from_json, program_to_json
from lowtide.profiling.profile import json_ready
from lowtide.techniques.registry import find_technique
from lowtide.techniques.technique import Option
from lowtide.version import __version__

PLAN_VERSION = 6
_LARGEST = 2**63  # of whole numbers: no device has as many bytes


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """A plan as JSON-ready data; unknown seconds are null."""
    data = {"version": PLAN_VERSION, "lowtide": __version__, "fidelity": plan.fidelity, **_fields(plan)}
    if plan.program is not None:
        data["program"] = {
            **_fields(plan.program),
            "ops_again": plan.program.ops_again,
            "stages": [{"outline": stage.outline, **_fields(stage.choice)} for stage in plan.program.stages],
            "instructions": program_to_json(plan.program.instructions),
        }
    return json_ready(data)


def _fields(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in fields(value)}


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
        return _read(Plan, data)
    except KeyError as error:
        raise PlanError(f"The plan has no field {error}", hint="Plan again.") from error
    except (TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise PlanError(f"The plan is malformed: {error}", hint="Plan again.") from error


def _read(kind: Any, value: Any, name: str = "", *, may_be_negative: bool = False) -> Any:
    """A value as the type of the field ``name``, checked."""
    if kind in _READERS:
        return _READERS[kind](value)
    if is_dataclass(kind):
        types, signed = get_type_hints(kind), kind is Choice  # which may cost bytes
        given = {field.name: value[field.name] for field in fields(kind)}
        return cast(Any, kind)(**{key: _read(types[key], given[key], key, may_be_negative=signed) for key in given})
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is UnionType:  # with None
        return None if value is None else _read(arguments[0], value, name)
    if origin in (tuple, frozenset):
        if not isinstance(value, list | tuple):
            raise TypeError(f"{_shown(value)} is not a list")
        return origin(_read(arguments[0], each, name) for each in value)
    if origin is Literal and value not in arguments:
        raise ValueError(f"{_shown(value)} is none of {', '.join(arguments)}")
    if kind is str and not isinstance(value, str):
        raise TypeError(f"{_shown(value)} is not text")
    if kind is float:
        return _number(value, name)
    if kind is int:
        return _whole(value, name, least=-_LARGEST if may_be_negative else 0)
    return value if origin is Literal else kind(value)


def _stage(data: Any) -> PlannedStage:
    return PlannedStage(_read(str, data["outline"]), _read(StageChoice, data))


def _option(data: Any) -> Option:
    name = _read(str, data["technique"])
    return Option(name, _read(tuple[str, ...], data["site"]), find_technique(name).config.from_json(data["config"]))


_READERS: Mapping[Any, Callable[[Any], Any]] = {Program: program_from_json, PlannedStage: _stage, Option: _option}


def _whole(value: Any, name: str, *, least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) >= _LARGEST:
        raise ValueError(f"{name} is {_shown(value)}, not a whole number of bytes")
    if value < least:
        raise ValueError(f"{name} is {value}, not a whole number")
    return value


def _number(value: Any, name: str) -> float:
    """Seconds or a bound; null is an unknown one."""
    if value is None:
        return math.nan
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < _LARGEST:
        raise ValueError(f"{name} is {_shown(value)}, not a number")
    return float(value)


def _shown(value: Any) -> str:
    """Shorten a value for an error; Python refuses to print the largest integers."""
    if isinstance(value, int) and abs(value) >= _LARGEST:
        return "an integer beyond 64 bits"
    return reprlib.repr(value)
