"""Plans as JSON: read back as they were written, or refused with the reason."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from lowtide.engines import plan
from lowtide.errors import PlanError
from lowtide.planning import Plan
from tests.refusals import refused

from .steps import chain


@pytest.fixture(scope="module")
def found() -> Plan:
    return plan(chain(), "60%", fake=True, tune=False)


@pytest.fixture(scope="module")
def with_program() -> Plan:
    return plan(chain(3), "60%", engine="graph", tune=False)


@pytest.mark.parametrize("name", ["found", "with_program"])
def test_a_plan_survives_json(name: str, request: pytest.FixtureRequest) -> None:
    written: Plan = request.getfixturevalue(name)
    assert Plan.from_json(json.dumps(written.to_json(), allow_nan=False)) == written
    assert Plan.from_json(written.to_json()) == written


def test_a_plan_without_seconds_survives_json(found: Plan) -> None:
    unknown = replace(found, seconds=math.nan)
    text = json.dumps(unknown.to_json(), allow_nan=False)
    assert math.isnan(Plan.from_json(text).seconds)


def with_config(data: dict[str, Any], value: Any) -> dict[str, Any]:
    choice = data["choices"][0]
    return {**data, "choices": [{**choice, "option": {**choice["option"], "config": value}}]}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda d: "{not json", "not JSON"),
        (lambda d: "[1, 2]", "not a list"),
        (lambda d: {**d, "version": 99}, "version 99"),
        (lambda d: {**d, "version": 2}, "version 2, and this lowtide reads"),
        (lambda d: {k: v for k, v in d.items() if k != "version"}, "version None"),
        (lambda d: {k: v for k, v in d.items() if k != "baseline"}, "no field 'baseline'"),
        (lambda d: {**d, "peak_bytes": "much"}, "peak_bytes is 'much'"),
        (lambda d: {**d, "peak_bytes": -1}, "peak_bytes is -1"),
        (lambda d: {**d, "choices": 7}, "malformed"),
        (lambda d: {**d, "choices": [{**d["choices"][0], "fidelity": "perfect"}]}, "perfect"),
        (lambda d: {**d, "fingerprint": {"model": "x"}}, "no field 'modules'"),
        (lambda d: {**d, "fingerprint": {**d["fingerprint"], "batch": 3}}, "3 is not text"),
        (lambda d: {**d, "seconds_source": "guessed"}, "guessed"),
        (lambda d: {**d, "version": 10**5000}, "version an integer beyond 64 bits"),
        (lambda d: {**d, "budget_bytes": 10**400}, "budget_bytes is an integer beyond 64 bits"),
        (lambda d: {**d, "baseline": {**d["baseline"], "peak_bytes": 10**5000}}, "peak_bytes is an integer beyond"),
        (lambda d: {**d, "seconds": 10**400}, "seconds is an integer beyond 64 bits"),
        (lambda d: {**d, "choices": [{**d["choices"][0], "saved_bytes": 10**400}]}, "saved_bytes is an integer beyond"),
        (lambda d: {**d, "choices": [{**d["choices"][0], "saved_bytes": "12"}]}, "saved_bytes is '12'"),
        (lambda d: with_config(d, {"trees": [10**400]}), "trees cannot be an integer beyond"),
        (lambda d: with_config(d, {"trees": [math.nan]}), "trees cannot be nan"),
        (lambda d: with_config(d, {"trees": [], "width": 3}), "no field 'width'"),
        (lambda d: with_config(d, {}), "needs the field 'trees'"),
        (lambda d: with_config(d, [["trees", []]]), "is an object with fields"),
        (lambda d: {**d, "notes": "9" * 10_000}, "is not a list"),
        (lambda d: {**d, "permission": {"loosest": "anything", "names": [], "forbidden": []}}, "anything"),
        (lambda d: {**d, "permission": {"loosest": "bitwise", "names": 3, "forbidden": []}}, "is not a list"),
        (lambda d: {**d, "permission": None}, "malformed"),
    ],
)
def test_a_malformed_plan_is_refused_with_the_reason(found: Plan, change: Any, reason: str) -> None:
    with refused(reason, kind=PlanError):
        Plan.from_json(change(found.to_json()))


def changed(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda data: {**data, "program": {**data["program"], **changes}}


def without(field: str) -> Callable[[dict[str, Any]], Any]:
    return lambda data: {**data, "program": {k: v for k, v in data["program"].items() if k != field}}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda data: json.dumps(data)[:-9], "not JSON"),
        (lambda data: {k: v for k, v in data.items() if k != "program"}, "no field 'program'"),
        (lambda data: {**data, "program": "F1e, B1"}, "malformed"),
        (lambda data: {**data, "program": [1]}, "malformed"),
        *((without(field), field) for field in ("instructions", "graph", "lowering", "room_bytes", "fidelity", "why")),
        (changed(instructions="F1e, B1"), "malformed"),
        (changed(instructions={"version": 0}), "version 0"),
        (changed(room_bytes=-1), "room_bytes is -1"),
        (changed(room_bytes=1.5), "room_bytes is 1.5"),
        (changed(seconds="soon"), "soon"),
        (changed(fidelity="perfect"), "perfect"),
        (changed(graph=None), "None"),
        (changed(why=[1]), "1"),
        (changed(why="so"), "'so'"),
        (changed(stages=[{"outline": "x"}]), "no field 'stage'"),
    ],
)
def test_a_malformed_program_is_refused_with_the_reason(with_program: Plan, change: Any, reason: str) -> None:
    with refused(reason, kind=PlanError):
        Plan.from_json(change(with_program.to_json()))


@pytest.mark.parametrize("text", ["[" * 100_000, '{"version": ' + "9" * 5000 + "}"])
def test_json_that_cannot_be_read_is_no_plan(text: str) -> None:
    with refused("JSON", kind=PlanError):
        Plan.from_json(text)
