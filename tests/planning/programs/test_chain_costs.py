"""The chain of a graph's stages counts what its programs take, temporaries and workspaces included."""

from collections.abc import Callable

import pytest

from lowtide.chains import keep_all, simulate, sqrt
from lowtide.planning.programs.chain_costs import complete_chain
from lowtide.planning.programs.chain_order import program_of
from lowtide.planning.programs.program import simulate as simulate_program
from lowtide.planning.programs.stages import Stages
from lowtide.tracing.capture.loss import capture_joint
from lowtide.workload import Workload

from ..orders import convolutions, mlp


@pytest.mark.parametrize("make", [mlp, convolutions])
def test_a_chains_peak_is_its_programs(make: Callable[[], Workload]) -> None:
    stages = Stages(capture_joint(make()))
    chain = complete_chain(stages, lambda node: 1.0, lambda node: 0)
    for schedule in (keep_all(chain), sqrt(chain)):
        program = program_of(stages, schedule)
        beyond = simulate(chain, schedule).peak_bytes - simulate_program(program).peak_bytes
        assert 0 <= beyond <= 2  # the batch and the loss count one byte each


def test_a_workspace_counts_in_the_stage_of_its_op() -> None:
    stages = Stages(capture_joint(mlp()))
    plain = complete_chain(stages, lambda node: 1.0, lambda node: 0)
    node = next(node for node in stages.forward[3] if "addmm" in node.name)
    taken = complete_chain(stages, lambda node: 1.0, lambda each: 2**20 if each is node else 0)
    more = [b - a for a, b in zip(plain.forward_temporary_bytes, taken.forward_temporary_bytes, strict=True)]
    assert [place for place, size in enumerate(more) if size] == [3]
    assert simulate(taken, keep_all(taken)).peak_bytes > simulate(plain, keep_all(plain)).peak_bytes


def test_recomputation_of_cheap_results_takes_their_seconds() -> None:
    stages = Stages(capture_joint(convolutions()))
    chain = complete_chain(stages, lambda node: 1.0, lambda node: 0)
    again = program_of(stages, keep_all(chain).lightly()).recomputed
    assert sum(chain.light_seconds) == again > 0
