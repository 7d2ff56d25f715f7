"""The order of a chain's schedule: every op finds its values, and recomputation follows the schedule."""

from __future__ import annotations

import pytest

from lowtide import zoo
from lowtide.chains import keep_all, sqrt
from lowtide.planning.programs.chain_order import program_of
from lowtide.planning.programs.program import Kind, check_program
from lowtide.planning.programs.stages import Stages
from lowtide.tracing.capture.loss import capture_joint


@pytest.mark.parametrize("name", ["lenet", "gpt2"])
def test_a_schedules_ops_find_their_values(name: str) -> None:
    stages = Stages(capture_joint(zoo.small(name)))
    chain = stages.chain(lambda node: 1.0)
    whole, again = program_of(stages, keep_all(chain)), program_of(stages, sqrt(chain))
    check_program(whole)
    check_program(again)
    assert whole.recomputed == 0 < again.recomputed
    computed = [each.value for each in again.backward if each.kind is Kind.COMPUTE]
    assert computed == [each.value for each in whole.backward if each.kind is Kind.COMPUTE]
