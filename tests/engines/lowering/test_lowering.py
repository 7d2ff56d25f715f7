"""Lowerings are known by their registry alone: a plan names the one that runs its program."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lowtide.engines import apply, plan
from lowtide.engines.lowering.lowering import LOWERINGS, Lowered
from lowtide.engines.lowering.ops import OpsLowering
from lowtide.errors import PlanError
from lowtide.planning import Plan
from lowtide.planning.programs.program import Program
from lowtide.tracing.capture.joint import Joint

from ..planned import awkward


class ToyLowering(OpsLowering):
    """The ops, counted."""

    name = "toy"

    def __init__(self) -> None:
        self.programs: list[Program] = []

    def lower(self, joint: Joint, program: Program) -> Lowered:
        self.programs.append(program)
        return super().lower(joint, program)


def test_the_lowering_that_a_plan_names_runs_its_program() -> None:
    work = awkward()
    planned = plan(work, "80%", engine="graph", tune=False)
    assert planned.program is not None
    assert planned.program.lowering == "ops"
    toy = replace(planned, program=replace(planned.program, lowering="toy"))
    with pytest.raises(PlanError, match="toy"):
        apply(toy, work)
    torch.manual_seed(1)
    expected = work.compute_loss()
    with LOWERINGS.register(lowering := ToyLowering()), apply(Plan.from_json(toy.to_json()), work) as step:
        torch.manual_seed(1)
        assert torch.equal(step.loss(work.batch), expected)
    assert lowering.programs == [planned.program.instructions]
