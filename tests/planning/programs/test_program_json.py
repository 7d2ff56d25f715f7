"""Programs as JSON: the same program back, small, and nothing that cannot run."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lowtide.planning.programs.program import Kind, Program
from lowtide.planning.programs.program_json import program_from_json, program_to_json


def test_a_program_survives_json(programs: list[Program]) -> None:
    assert {each.kind for program in programs for each in (*program.forward, *program.backward)} == set(Kind)
    for program in programs:
        assert program_from_json(json.loads(json.dumps(program_to_json(program)))) == program


def test_an_instruction_takes_few_bytes(programs: list[Program]) -> None:
    for program in programs:
        size = len(json.dumps(program_to_json(program)))
        assert size < 50 * (len(program.forward) + len(program.backward))


@pytest.mark.parametrize(
    "change",
    [
        {"version": 1},
        {"ops": ""},
        {"values": "0;0"},
        {"values": "0 0 9"},
        {"values": "0 -1"},
        {"values": "x"},
        {"forward": "0"},
        {"forward": "0 0 0 99999"},
        {"forward": "99 0 -1"},
        {"forward": ""},
        {"backward": 7},
        {"kept": "99999"},
        {"gradients": "-2"},
        {"storages": "1 x"},
        {"bytes": "0 -5"},
        {"bytes": "0"},
    ],
)
def test_a_malformed_program_is_refused(programs: list[Program], change: dict[str, Any]) -> None:
    data = {**program_to_json(programs[1]), **change}
    with pytest.raises((ValueError, AttributeError)):
        program_from_json(data)
