"""Programs as JSON: the same program back, small, and nothing that cannot run."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from lowtide import Workload
from lowtide.errors import PlanError
from lowtide.planning.programs.offloading import with_offloaded
from lowtide.planning.programs.program import Kind, Program, Value, check_program
from lowtide.planning.programs.program_json import program_from_json, program_to_json
from lowtide.planning.programs.strategies import plain, sqrt_without_cheap
from lowtide.tracing.capture.joint import Joint
from lowtide.tracing.capture.loss import capture_joint


@pytest.fixture(scope="module")
def joint() -> Joint:
    layers = [layer for _ in range(6) for layer in (nn.Linear(16, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Dropout(0.1))]
    return capture_joint(
        Workload(nn.Sequential(*layers), lambda model, x: model(x).square().mean(), torch.randn(32, 16))
    )


@pytest.fixture(scope="module")
def programs(joint: Joint) -> list[Program]:
    whole = plain(joint)
    alone = [value for value in whole.kept if value in whole.bytes and not value.is_state]
    return [whole, sqrt_without_cheap(joint), with_offloaded(whole, alone[:2])]


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
        {"version": 2},
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


def test_a_program_that_lost_an_instruction_is_refused(programs: list[Program]) -> None:
    program = programs[1]
    read = {value for each in program.backward for value in each.reads}
    computed = [
        place for place, each in enumerate(program.backward) if each.kind is Kind.RECOMPUTE and each.cell in read
    ]
    for place in random.Random(0).sample(computed, 5):
        shorter = replace(program, backward=(*program.backward[:place], *program.backward[place + 1 :]))
        with pytest.raises(PlanError):
            check_program(shorter)


def test_a_program_that_keeps_too_little_or_unknown_values_is_refused(programs: list[Program]) -> None:
    for kept in ((), (*programs[0].kept, Value("gelu", run=3))):
        with pytest.raises(PlanError):
            check_program(replace(programs[0], kept=kept))
