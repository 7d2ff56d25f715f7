"""The block solver: bits of plain PyTorch, fewer bytes for more seconds, and equal blocks treated alike."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from lowtide import Workload
from lowtide.engines import graph
from lowtide.planning.programs.fused import fused_seconds, is_free
from lowtide.planning.programs.program import Program, check_program, simulate
from lowtide.planning.solvers.blocks import BlockSolver
from lowtide.planning.solvers.solver import Problem, Solution, solutions
from lowtide.tracing.capture.blocks import blocks_of
from lowtide.tracing.capture.joint import Joint, bytes_of
from lowtide.tracing.capture.loss import capture_joint
from tests.models import InTurn, squares

from ...engines.counting import assert_equal, executed_peak, plain_results, results
from ...engines.lowered import convolutions, language_model
from ...soak import in_soak


def problem_of(joint: Joint, **settings: Any) -> Problem:
    seconds = fused_seconds(joint, lambda node: 1.0 + bytes_of(node))
    return Problem(joint, seconds, is_free=partial(is_free, joint), **{"prefers_blocks": True, **settings})


def solve(joint: Joint) -> list[Solution]:
    return BlockSolver().solve(problem_of(joint))


def check_bits_and_bytes(work: Workload) -> None:
    for place in (-1, *in_soak([0])):
        solved: list[Solution] = []

        def planner(joint: Joint, solved: list[Solution] = solved, place: int = place) -> Program:
            solved += solve(joint)
            return solved[place].program

        loss = graph.planned_loss(work, planner)
        expected = plain_results(work)
        assert_equal(results(work, loss), expected)
        assert simulate(solved[place].program).peak_bytes == executed_peak(work, loss)
    assert solved[-1].program.recomputed > 0
    assert solved[-1].estimate_bytes < solved[0].estimate_bytes


def test_programs_keep_the_bits_of_language_models_and_convolutions() -> None:
    check_bits_and_bytes(language_model(dropout=0.2, layers=3))
    check_bits_and_bytes(convolutions(blocks=3))


@pytest.fixture(scope="module")
def alike() -> Joint:
    """The graph of equal blocks."""
    return capture_joint(language_model(layers=3))


def test_more_seconds_keep_fewer_bytes_between_the_passes(alike: Joint) -> None:
    solved = solve(alike)
    seconds = [each.seconds for each in solved]
    assert seconds == sorted(seconds)
    assert len(solved) > 4
    for each in solved:
        check_program(each.program)
        assert abs(simulate(each.program).peak_bytes - each.estimate_bytes) <= 0.02 * each.estimate_bytes


def test_at_most_one_kind_of_block_is_treated_in_two_ways() -> None:
    parts = [
        nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(8, 8), nn.Tanh())))
        for depth in (5, 5, 5, 8, 8, 8)
    ]
    joint = capture_joint(Workload(InTurn(*parts), squares, torch.randn(16, 8)))
    block_of = blocks_of(joint)
    kinds: dict[int, list[str]] = defaultdict(list)  # by the number of forward ops, which tells kinds apart here
    ops: dict[str, int] = defaultdict(int)
    for node in joint.forward:
        if path := block_of(node):
            ops[path] += 1
    for path, count in ops.items():
        kinds[count].append(path)
    solved = solve(joint)
    assert solved
    for each in solved:
        ways: dict[str, set[str]] = {path: set() for path in ops}
        for instruction in each.program.backward:
            if instruction.kind.name == "RECOMPUTE" and (path := block_of(joint.nodes[instruction.value.op])):
                ways[path].add(str(joint.nodes[instruction.value.op].target))
        distinct = [len({frozenset(ways[path]) for path in paths}) for paths in kinds.values()]
        assert max(distinct) <= 2
        assert sum(count > 1 for count in distinct) <= 1


def test_nothing_is_solved_where_no_blocks_are_alike_or_nobody_prefers_them(alike: Joint) -> None:
    joint = capture_joint(Workload(nn.Sequential(nn.Linear(4, 4), nn.GELU()), squares, torch.randn(2, 4)))
    assert solve(joint) == []
    assert BlockSolver().solve(problem_of(alike, prefers_blocks=False)) == []


def test_programs_that_save_little_beside_equal_blocks_are_left_out(alike: Joint) -> None:
    problem = problem_of(alike)
    whole = sum(problem.kernels.ops.seconds)
    offered = solutions(problem)
    equal = [each for each in offered if each.treats_blocks_alike]
    assert equal
    for each in offered:
        for other in equal:
            if not each.treats_blocks_alike and other.estimate_bytes <= each.estimate_bytes:
                assert each.seconds < other.seconds - 0.02 * whole
    every = solutions(problem_of(alike, prefers_blocks=False))
    assert min(each.estimate_bytes for each in offered) == min(each.estimate_bytes for each in every)
    assert len(offered) - len(equal) < len(every)


def test_results_that_cost_nothing_are_recomputed_from_the_first_program_on(alike: Joint) -> None:
    free_of_charge = Problem(alike, fused_seconds(alike, lambda _: 0.0), prefers_blocks=True)
    first = BlockSolver().solve(free_of_charge)[0]
    everything = solutions(replace(free_of_charge, prefers_blocks=False))[0]
    assert first.seconds == everything.seconds == 0.0
    assert first.program.recomputed > 0
