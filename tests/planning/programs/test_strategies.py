"""Cheap results made again leave the plain step's bits; each strategy takes less than the one before."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from lowtide import Workload, zoo
from lowtide.chains import recursive
from lowtide.engines.graph import planned_loss
from lowtide.planning.programs.liveness import is_elementwise, lives, lives_in_place, order_of, peak_bytes
from lowtide.planning.programs.program import Program, simulate
from lowtide.planning.programs.stages import Stages
from lowtide.planning.programs.strategies import (
    StrategyBytes,
    compare_strategies,
    plain,
    sqrt_without_cheap,
    without_cheap,
)
from lowtide.planning.programs.writer import program_of
from lowtide.tracing.capture.batchnorm import is_batch_norm
from lowtide.tracing.capture.joint import Joint, is_item
from lowtide.tracing.capture.loss import capture_joint
from tests.planning.orders import convolutions, lstm, mlp

STEPS: dict[str, Callable[[], Workload]] = {
    "mlp": mlp,
    "convolutions": convolutions,
    "lstm": lstm,
    "resnet": lambda: zoo.small("wrn28-2", depth=10),
    "dropout": lambda: zoo.small("gpt2"),
}


def recursive_without_cheap(joint: Joint) -> Program:
    stages = Stages(joint)
    return program_of(stages, recursive(stages.chain(lambda node: 1.0)).lightly())


@pytest.mark.parametrize(
    ("name", "planner"),
    [
        *((name, planner) for name in ("mlp", "convolutions") for planner in (without_cheap, recursive_without_cheap)),
        *((name, sqrt_without_cheap) for name in STEPS),
    ],
)
def test_a_step_without_cheap_results_gives_the_plain_steps_bits(name: str, planner: Any) -> None:
    work = STEPS[name]()
    expected = outcome(work, lambda batch: work.compute_loss(batch=batch))
    torch._dynamo.reset()
    found = outcome(work, planned_loss(work, planner))
    assert all(map(torch.equal, found, expected))


def outcome(work: Workload, loss: Callable[[Any], Tensor]) -> list[Tensor]:
    start = copy.deepcopy(work.model.state_dict())
    work.model.zero_grad()
    torch.manual_seed(3)
    value = loss(work.batch)
    value.backward()
    gradients = [p.grad for p in work.model.parameters() if p.grad is not None]
    found = [value.detach(), *gradients, *(b.clone() for b in work.model.buffers()), torch.get_rng_state()]
    work.model.load_state_dict(start)
    return found


@cache
def usages_of(name: str, depth: int | None = None) -> tuple[StrategyBytes, ...]:
    return compare_strategies(capture_joint(STEPS[name]() if depth is None else mlp(depth)))


@pytest.mark.parametrize("name", ["mlp", "convolutions", "lstm", "resnet"])
def test_each_strategy_takes_less_than_the_one_before(name: str) -> None:
    none, in_place, sharing, both, cheap, segments = (usage.bytes for usage in usages_of(name))
    assert none > in_place > both
    assert none > sharing >= both > cheap > segments


@pytest.mark.parametrize("name", ["mlp", "convolutions", "lstm", "resnet"])
def test_no_way_to_give_out_memory_takes_less_than_what_lives(name: str) -> None:
    for usage in usages_of(name):
        assert usage.live_bytes <= min(usage.bytes, usage.tagged_bytes, usage.pooled_bytes)
        assert usage.bytes <= 1.05 * usage.live_bytes  # best fit over intervals loses little on real steps
        assert 0 <= usage.fragmentation < 1


def test_bytes_of_an_mlp_by_hand() -> None:
    """Six layers of 8 KiB: pre-activations and activations are kept; the last activation, and two more in backward."""
    one = 128 * 16 * 4
    none, _, sharing, both, cheap, _ = usages_of("mlp", 6)
    # Forward: 6 of addmm, 6 of gelu, the square. Backward: the square's by div, pow, mul and mul; 6 of gelu's, 5 of mm.
    assert none.bytes // one == 6 + 6 + 1 + 4 + 6 + 5
    assert sharing.bytes // one == 12 + 2
    assert both.bytes // one == 12 + 1
    assert cheap.bytes // one == 6 + 2


def test_without_cheap_results_convolutions_alone_are_kept() -> None:
    joint = capture_joint(convolutions(4))
    kept = {cell.op for cell in without_cheap(joint).kept}
    large = [node.name for node in joint.forward if node.name in kept and node.meta["val"].numel() > 8]
    assert large == ["convolution", "convolution_1", "convolution_2", "convolution_3"]


def test_only_cheap_results_run_again_and_each_once() -> None:
    joint = capture_joint(STEPS["resnet"]())
    program = without_cheap(joint)
    again = [each.cell.op for each in program.backward if each.kind == "recompute"]
    assert again
    assert len(again) == len(set(again)) == program.recomputed
    cheap = [node for node in joint.forward if is_elementwise(node) or is_batch_norm(node) or is_item(node)]
    assert set(again) <= {node.name for node in cheap}
    assert Stages(joint).cheap.dropped <= set(joint.forward)


def test_segments_grow_slower_than_the_depth() -> None:
    shallow, deep = usages_of("mlp", 8), usages_of("mlp", 32)
    assert deep[-1].bytes <= 2 * shallow[-1].bytes  # √4
    assert deep[3].bytes > 3.5 * shallow[3].bytes


@pytest.mark.parametrize("name", ["mlp", "lstm"])
def test_the_programs_simulator_counts_between_in_place_and_sharing(name: str) -> None:
    """The engine writes over an op's first input alone, so it may take more than in place, never more than sharing."""
    joint = capture_joint(STEPS[name]())
    tangents = sum(node.meta["val"].nbytes for node in joint.tangents)
    for planner in (plain, without_cheap, sqrt_without_cheap):
        program = planner(joint)
        order = order_of(joint, program)
        simulated = simulate(program).peak_bytes - tangents
        assert peak_bytes(lives_in_place(order)) <= simulated <= peak_bytes(lives(order))
