"""Regions of a program: one for each block, with all that it reads there before it, and no more handed on than read."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from lowtide import Workload
from lowtide.engines.lowering.regions import Region, base_of, is_own_op, regions_of, runs_alone
from lowtide.planning.programs.program import Instruction, Kind, Program, Role, Value
from lowtide.planning.programs.strategies import plain
from lowtide.tracing.capture.joint import Joint, viewed
from lowtide.tracing.capture.loss import capture_joint
from tests.models import Call, InTurn, squares

from ..lowered import LoweredStep, convolutions, language_model, makers_of

LAYERS = 4


class Cut:
    """Both passes of a program as regions."""

    def __init__(self, joint: Joint, program: Program) -> None:
        self.joint, self.program, self.makers = joint, program, makers_of(program)
        self.backward = regions_of(joint, program.backward, self.makers)
        computed = {value for region in self.backward for value in region.results}
        given = {Value(node.name) for node in (*joint.primals, *joint.tangents)}
        read = dict.fromkeys(value for region in self.backward for value in region.reads)
        self.kept = [value for value in read if value not in computed | given]
        self.returned = [Value(node.name) for node in joint.outputs if isinstance(node, fx.Node)]
        self.forward = regions_of(joint, program.forward, self.makers, read_later=self.kept, returned=self.returned)

    @property
    def passes(self) -> list[tuple[list[Region], tuple[Instruction, ...]]]:
        return [(self.forward, self.program.forward), (self.backward, self.program.backward)]

    def node(self, value: Value) -> fx.Node:
        return self.joint.nodes[value.op]


@cache
def step(name: str) -> LoweredStep:
    return LoweredStep(convolutions() if name == "convolutions" else language_model(dropout=0.2, layers=LAYERS))


@pytest.fixture(params=["GPT-2", "convolutions"])
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=["everything", "smallest"])
def cut(request: pytest.FixtureRequest, name: str) -> Cut:
    return Cut(step(name).joint, step(name).programs[request.param])


def test_equal_blocks_give_equal_regions() -> None:
    joint = step("GPT-2").joint
    cut = Cut(joint, plain(joint))
    for regions in (cut.forward, cut.backward):
        ops = Counter(tuple(str(cut.node(each.value).target) for each in region.instructions) for region in regions)
        most, times = max(((ops, times) for ops, times in ops.items()), key=lambda each: each[1] * len(each[0]))
        assert times >= LAYERS - 1  # the first or last block runs with what is beside it
        assert len(most) > 20


def test_every_instruction_is_in_one_region_in_the_programs_order(cut: Cut) -> None:
    for regions, instructions in cut.passes:
        ops = [each for each in instructions if each.kind in (Kind.COMPUTE, Kind.RECOMPUTE)]
        own = [each for region in regions for each in region.instructions]
        assert set(own) >= {each for each in ops if not each.value.is_state}
        computed = [each for each in own if viewed(cut.node(each.value)) is None]  # views may be taken again
        assert computed == [each for each in ops if viewed(cut.node(each.value)) is None and not each.value.is_state]


def test_every_gradient_is_returned_once(cut: Cut) -> None:
    returned = [each for region in cut.backward for each in region.returned]
    assert returned == [each for each in cut.program.backward if each.kind is Kind.RETURN_GRAD and each.reads]
    assert not [each for region in cut.forward for each in region.returned]


def test_every_read_is_produced_before(cut: Cut) -> None:
    primals = {Value(node.name) for node in cut.joint.primals}
    tangents = {Value(node.name) for node in cut.joint.tangents}
    for regions, live in ((cut.forward, set(primals)), (cut.backward, primals | tangents | set(cut.kept))):
        for region in regions:
            here = set(region.reads)
            assert here <= live
            for each in region.instructions:
                assert here.issuperset(each.reads), each
                here |= {each.value, each.value._replace(role=Role.STATE)}
            live |= set(region.results)
            assert live.issuperset(each.reads[0] for each in region.returned)
    assert {value for region in cut.forward for value in region.results} >= set(cut.kept)


def test_views_are_taken_again_where_they_are_read(cut: Cut) -> None:
    gradients = {each.reads[0] for region in cut.backward for each in region.returned}
    for region in (*cut.forward, *cut.backward):
        for value in (*region.reads, *region.results):
            if value not in gradients and value not in cut.returned:
                assert base_of(cut.joint, value, cut.makers) == value
                assert viewed(cut.node(value)) is None or runs_alone(cut.joint, cut.node(value))


def test_results_are_what_later_regions_read_or_what_leaves_the_program(cut: Cut) -> None:
    gradients = {each.reads[0] for region in cut.backward for each in region.returned}
    for regions, leaving in ((cut.forward, {*cut.kept, *cut.returned}), (cut.backward, gradients)):
        for index, region in enumerate(regions):
            later = {value for each in regions[index + 1 :] for value in each.reads}
            assert set(region.results) <= later | leaving
            assert len(set(region.results)) == len(region.results)


def test_draws_and_own_ops_are_regions_that_are_not_compiled(cut: Cut) -> None:
    for region in (*cut.forward, *cut.backward):
        alone = [runs_alone(cut.joint, cut.node(each.value)) for each in region.instructions]
        assert not (region.is_compiled and any(alone))
        assert region.is_compiled or any(alone) or not alone


# -- blocks ----------------------------------------------------------------------------------------------


def part() -> Call:
    def run(m: Any, x: Tensor) -> Tensor:
        for _ in range(3):
            x = x + F.gelu(m.two(F.silu(m.one(x))))
        return x

    return Call(run, one=nn.Linear(8, 8), two=nn.Linear(8, 8))


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "numbered": (lambda: InTurn(*(part() for _ in range(3))), 3),
    "named": (lambda: Call(lambda m, x: m.last(m.middle(m.first(x))), first=part(), middle=part(), last=part()), 1),
    "of one op each": (lambda: InTurn(*(nn.Linear(8, 8) for _ in range(9))), 1),
}


@pytest.mark.parametrize("parts", MODELS)
def test_blocks_are_numbered_modules_with_several_ops(parts: str) -> None:
    model, count = MODELS[parts]
    joint = capture_joint(Workload(model(), squares, torch.randn(4, 8)))
    cut = Cut(joint, plain(joint))
    assert len(cut.forward) == count
    assert len(cut.backward) in (count, count + 1)  # the loss may have one of its own
    assert all(region.is_compiled for region in (*cut.forward, *cut.backward))


def test_masks_are_taken_apart_and_other_kernels_of_lowtide_are_not() -> None:
    graph = fx.Graph()
    seed = graph.placeholder("seed")
    mask = graph.call_function(torch.ops.lowtide.dropout_mask.default, (seed, [4], 0.5))
    fused = graph.call_function(torch.ops.lowtide.linear_cross_entropy.default, (seed,))
    item = graph.call_function(operator.getitem, (fused, 0))
    plain_op = graph.call_function(torch.ops.aten.relu.default, (seed,))
    assert [is_own_op(node) for node in (mask, fused, item, plain_op)] == [False, True, True, False]
