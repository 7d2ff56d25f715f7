"""Composite ops in captured graphs: those of the plain step, and its random numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide import Workload
from lowtide.engines import graph
from lowtide.tracing.capture.decompositions import plain_composites
from tests.models import Call, squares

from ...engines.counting import Planner, assert_equal, plain_results, results
from ...soak import in_soak

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

_LABELS = torch.arange(8)
OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout of a transposed tensor": lambda x: F.dropout(x.t(), 0.3),
    "all dropped": lambda x: F.dropout(x, 1.0) + F.dropout(x, 0.5),
    "nearest": lambda x: F.interpolate(x.view(1, 2, 8, 8), scale_factor=1.7),
    "bicubic": lambda x: F.interpolate(x.view(1, 2, 8, 8), scale_factor=1.7, mode="bicubic"),
    "margin": lambda x: F.multi_margin_loss(x.float(), _LABELS),
    "error function": lambda x: torch.erf(x),
    "interpolation": lambda x: torch.lerp(x, x.flip(0), 0.3),
    "sinc": lambda x: torch.sinc(x),
    "zeros": lambda x: torch.angle(x),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, *in_soak([torch.float32])])
@pytest.mark.parametrize("name", OPS)
def test_a_captured_op_gives_the_plain_steps_bits_and_random_numbers(name: str, dtype: torch.dtype) -> None:
    def weighted(model: Any, x: Tensor) -> Tensor:
        made = OPS[name](model.weight * x).float()
        return (made * torch.linspace(0.3, 1.7, made.numel()).view(made.shape)).sum()

    torch.manual_seed(0)
    model = Call(weighted, weight=nn.Parameter(torch.randn(8, 16).to(dtype)))
    work = Workload(model, lambda model, x: model(x), torch.ones((), dtype=dtype))
    plain = plain_results(work)
    actual = results(work, graph.planned_loss(work, Planner("all")))
    assert all(map(torch.equal, actual, plain))


def test_dropout_of_everything_set_after_planning_leaves_other_masks_alone() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.5))
    work = Workload(model, squares, torch.randn(64, 8))
    loss = graph.planned_loss(work, Planner("all"))
    loss(work.batch)
    model[1].p = 1.0
    actual = results(work, loss)
    assert_equal(actual, plain_results(work))


def test_torchs_decompositions_are_restored() -> None:
    ops = (torch.ops.aten.dropout.default, torch.ops.aten.upsample_nearest2d.vec)
    before = [dict(op.py_kernels) for op in ops]
    with plain_composites, plain_composites:
        assert [dict(op.py_kernels) for op in ops] != before
    assert [dict(op.py_kernels) for op in ops] == before
