"""A joint graph's ops and values: the plain program's bytes, and orders that find their values."""

from __future__ import annotations

from typing import Any

import pytest

from lowtide import zoo
from lowtide.planning.programs.program import check_program, simulate
from lowtide.planning.programs.strategies import plain
from lowtide.planning.solvers.joint_ops import JointOps
from lowtide.planning.solvers.runs import RunTimeline
from lowtide.planning.solvers.segments import on_demand
from lowtide.tracing.capture.joint import bytes_of
from lowtide.tracing.capture.loss import capture_joint

SIZES: dict[str, dict[str, Any]] = {"lenet": {}, "gpt2": {"layers": 1}, "densenet121": {"blocks": (1, 1, 2, 1)}}


@pytest.mark.parametrize("name", SIZES)
def test_bytes_are_the_programs(name: str) -> None:
    joint = capture_joint(zoo.small(name, **SIZES[name]))
    kernels = JointOps(joint, bytes_of)
    tangents = sum(map(bytes_of, joint.tangents))
    assert RunTimeline(kernels.ops, {}).peak_bytes + tangents == simulate(plain(joint)).peak_bytes
    again = on_demand(kernels.ops, set())
    program = kernels.program(RunTimeline(kernels.ops, again))
    check_program(program)
    assert simulate(program).peak_bytes == pytest.approx(RunTimeline(kernels.ops, again).peak_bytes, rel=0.02)
