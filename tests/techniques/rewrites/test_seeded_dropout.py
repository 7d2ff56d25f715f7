"""Dropouts draw from seeds: one draw for all, the mask and its scale as plain PyTorch has them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lowtide import Workload
from lowtide.kernels.dropout_mask import dropout_mask
from lowtide.planning.programs.strategies import plain
from lowtide.techniques.rewrites import seeded_dropout
from lowtide.techniques.rewrites.seeded_dropout import seed_dropouts
from tests.models import Call

from ...engines.lowered import LoweredStep, dropping

aten: Any = torch.ops.aten


def step_of(*probabilities: float, autocast: torch.dtype | None = None, training: bool = True) -> LoweredStep:
    layers = [layer for p in probabilities for layer in (nn.Linear(8, 8), nn.Dropout(p))]
    model = nn.Sequential(*layers).train(training)
    work = Workload(model, lambda m, x: m(x).sum(), torch.randn(6, 8), autocast=autocast)
    return LoweredStep(work, seed_dropouts)


def calls(step: LoweredStep, target: Any) -> list[Any]:
    return step.joint.module.graph.find_nodes(op="call_function", target=target)


def test_all_masks_come_of_one_draw() -> None:
    step = step_of(0.1, 0.5, 0.9)
    assert step.rewritten == 3
    assert [len(calls(step, target)) for target in (aten.randint.low, aten.native_dropout.default)] == [1, 0]
    masks = calls(step, torch.ops.lowtide.dropout_mask.default)
    assert [node.args[2] for node in masks] == [0.1, 0.5, 0.9]
    assert len({node.args[0] for node in masks}) == 3  # seeds


@pytest.mark.parametrize("p", [0.25, 0.5])
def test_kept_elements_are_scaled_and_others_are_zero(p: float) -> None:
    # The gradient of the scale shows what dropout leaves.
    dropped = Call(lambda m, x: F.dropout(x * 1.0, p), scale=nn.Parameter(torch.ones(400, 8)))
    work = Workload(dropped, lambda m, x: (m(x) * m.scale).sum(), torch.rand(400, 8) + 1.0)
    step = LoweredStep(work, seed_dropouts)
    _, gradient, _ = step.results(plain(step.joint))
    torch.manual_seed(3)  # as before the step
    seed = torch.randint(-(2**31), 2**31 - 1, (1, 2), dtype=torch.int32)[0]
    mask = dropout_mask(seed, [400, 8], p)
    torch.testing.assert_close(gradient, mask * work.batch / (1 - p))


def test_each_program_has_the_same_masks_in_both_passes() -> None:
    work = dropping()
    step = LoweredStep(work, seed_dropouts)
    for program in step.programs.values():
        work.batch.grad = None
        value = step.results(program)[0]
        torch.testing.assert_close((work.batch * work.batch.grad).sum(), value)


def test_dropouts_made_of_other_ops_draw_as_the_plain_step_does() -> None:
    step = step_of(0.5, 0.5, autocast=torch.bfloat16)  # on a CPU a Bernoulli draw and a product
    assert step.rewritten == 0
    torch.testing.assert_close(step.results(plain(step.joint)), step.plain())


@pytest.mark.parametrize(
    ("probabilities", "training"), [((), True), ((0.0,), True), ((1.0,), True), ((0.5,), False)], ids=str
)
def test_dropouts_that_draw_nothing_are_left_alone(probabilities: tuple[float, ...], training: bool) -> None:
    step = step_of(*(probabilities or (0.0,)), training=training)
    assert step.rewritten == 0
    assert not calls(step, aten.randint.low)
    torch.testing.assert_close(step.results(plain(step.joint)), step.plain())


def test_masks_that_cannot_be_numbered_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seeded_dropout, "MOST_ELEMENTS", 47)
    step = step_of(0.5)
    assert step.rewritten == 0
    torch.testing.assert_close(step.results(plain(step.joint)), step.plain())
