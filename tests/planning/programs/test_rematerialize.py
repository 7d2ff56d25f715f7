"""Cheap results: recomputed once each, from kept ones, with the plain step's bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lowtide.chains import recursive
from lowtide.engines.graph import planned_loss
from lowtide.planning.programs.chain_order import program_of
from lowtide.planning.programs.liveness import is_elementwise
from lowtide.planning.programs.program import Program
from lowtide.planning.programs.stages import Stages
from lowtide.planning.programs.strategies import (
    sqrt_without_cheap,
    without_cheap,
)
from lowtide.tracing.capture.batchnorm import is_batch_norm
from lowtide.tracing.capture.joint import Joint, is_item
from lowtide.tracing.capture.loss import capture_joint
from tests.engines.counting import assert_equal, plain_results, results
from tests.planning.orders import convolutions
from tests.soak import in_soak

from .test_strategies import STEPS


def recursive_without_cheap(joint: Joint) -> Program:
    stages = Stages(joint)
    return program_of(stages, recursive(stages.chain(lambda node: 1.0)).lightly())


@pytest.mark.parametrize(
    ("name", "planner"),
    [
        ("convolutions", without_cheap),
        ("convolutions", recursive_without_cheap),
        *((name, sqrt_without_cheap) for name in ("resnet", "dropout", *in_soak(["mlp", "convolutions", "lstm"]))),
    ],
)
def test_a_step_without_cheap_results_gives_the_plain_steps_bits(name: str, planner: Any) -> None:
    work = STEPS[name]()
    expected = plain_results(work)
    torch._dynamo.reset()
    actual = results(work, planned_loss(work, planner))
    assert_equal(actual, expected)


def test_without_cheap_results_convolutions_alone_are_kept() -> None:
    joint = capture_joint(convolutions(4))
    kept = {cell.op for cell in without_cheap(joint).kept}
    large = [node.name for node in joint.forward if node.name in kept and node.meta["val"].numel() > 8]
    assert large == ["convolution", "convolution_1", "convolution_2", "convolution_3"]


def test_only_cheap_results_run_again_and_each_once() -> None:
    joint = capture_joint(STEPS["resnet"]())
    program = without_cheap(joint)
    again = [each.value.op for each in program.backward if each.kind == "recompute"]
    assert again
    assert len(again) == len(set(again)) == program.recomputed
    cheap = [node for node in joint.forward if is_elementwise(node) or is_batch_norm(node) or is_item(node)]
    assert set(again) <= {node.name for node in cheap}
    assert Stages(joint).cheap.dropped <= set(joint.forward)
