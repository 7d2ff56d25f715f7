"""The graph solver: the bits of plain PyTorch and the bytes of its programs, on graphs without cut vertices."""

from __future__ import annotations

import pytest
import torch.nn.functional as F
from benchmarks.shapes import SHAPES, work_of

from lowtide import Workload, zoo
from lowtide.engines import graph
from lowtide.planning.programs.offloading import HostLink
from lowtide.planning.programs.program import Program, check_program, simulate
from lowtide.planning.solvers.graph import GraphSolver
from lowtide.planning.solvers.solver import Problem, Solution
from lowtide.tracing.capture.joint import Joint, bytes_of
from lowtide.tracing.capture.loss import capture_joint

from ...engines.counting import assert_equal, executed_peak, plain_results, results
from ..held import LINK
from ..programs.test_codes import step


def solve(joint: Joint) -> list[Solution]:
    return GraphSolver().solve(Problem(joint, lambda node: 1.0 + bytes_of(node)))


def check_steps(work: Workload) -> list[Solution]:
    """Run the smallest program: the plain step's bits, the simulated bytes, which are the estimated ones."""
    solutions: list[Solution] = []

    def planner(joint: Joint) -> Program:
        solutions.extend(solve(joint))
        return solutions[-1].program

    loss = graph.planned_loss(work, planner)
    expected = plain_results(work)
    assert_equal(results(work, loss), expected)
    for solution in solutions[:: len(solutions) // 2]:
        check_program(solution.program)
        simulated = simulate(solution.program).peak_bytes
        assert abs(simulated - solution.estimate_bytes) <= 0.02 * simulated
    assert simulate(solutions[-1].program).peak_bytes == executed_peak(work, loss)
    assert solutions[-1].program.recomputed > 0 == solutions[0].program.recomputed
    return solutions


@pytest.mark.parametrize("name", SHAPES)
def test_programs_of_any_shape_keep_bits_and_bytes(name: str) -> None:
    solutions = check_steps(work_of(name, depth=1, width=8, rows=160))
    seconds = [solution.seconds for solution in solutions]
    sizes = [solution.estimate_bytes for solution in solutions]
    assert seconds == sorted(seconds)
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("name", ["unet", "gpt2"])
def test_random_ops_views_and_batch_norms_run_again(name: str) -> None:
    check_steps(zoo.small(name))


@pytest.mark.parametrize("link", [None, LINK, HostLink(1e12, 0.0, 2**40)], ids=["codes", "host", "fast host"])
def test_programs_that_need_less_permission_stay_where_others_beat_them(link: HostLink | None) -> None:
    joint = capture_joint(step(F.relu))
    alone = {str(solution) for solution in solve(joint)}
    offered = GraphSolver().solve(Problem(joint, lambda node: 1.0 + bytes_of(node), host=link, codes=link is None))
    held = [each for each in offered if each.techniques or each.host_bytes]
    assert any(
        other.seconds <= each.seconds and other.estimate_bytes <= each.estimate_bytes
        for other in held
        for each in solve(joint)
    )
    assert alone <= {str(each) for each in offered if each not in held}


def test_among_programs_that_need_the_same_none_beats_another() -> None:
    joint = capture_joint(zoo.small("gpt2"))
    offered = GraphSolver().solve(Problem(joint, lambda node: 1.0 + bytes_of(node), codes=True))
    for each in offered:
        for other in offered:
            if other is not each and (other.techniques, other.fidelity) == (each.techniques, each.fidelity):
                assert other.seconds > each.seconds or other.estimate_bytes > each.estimate_bytes
