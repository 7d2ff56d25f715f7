"""A step that was not planned is named for one reason, and runs with plain PyTorch's bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowtide import Workload, apply, plan

from .planned import squares, work_of

Loss = Callable[[nn.Module, Any], Tensor]


def layers(count: int = 4, width: int = 24) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(count)))


def workload(loss: Loss, model: nn.Module | None = None, *shape: int) -> Workload:
    model = model or layers()
    batch = torch.randn(*(shape or (96, 24)))
    return Workload(model, loss, batch, torch.optim.SGD(model.parameters(), lr=0.1))


def in_evaluation(model: nn.Module) -> None:
    model[2][2].eval()


def with_a_hook(model: nn.Module) -> None:
    model[1].register_forward_hook(lambda module, args, result: result * 2)


def frozen(model: nn.Module) -> None:
    model[0][0].weight.requires_grad_(False)


def otherwise(model: Any) -> None:
    model.scale = 3.0


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (in_evaluation, "2.2 is in evaluation mode now"),
        (with_a_hook, "1 has other hooks"),
        (frozen, "0.0.weight is frozen now"),
        (otherwise, "the loss runs other ops"),
    ],
)
def test_a_step_that_was_not_planned_is_said_to_be_another_for_one_reason(
    change: Callable[[Any], None], cause: str
) -> None:
    model: Any = nn.Sequential(
        *(nn.Sequential(nn.Linear(24, 24), nn.Tanh(), nn.Dropout(0.5)) for _ in range(4)),
    )
    model.scale = None
    work = workload(lambda m, x: (m(x) if m.scale is None else m(x) * m.scale).square().mean(), model)
    with apply(plan(work, "80%", engine="graph", tune=False), work) as step:
        change(model)
        with pytest.warns(RuntimeWarning, match=rf"not the one that was planned: {cause}.*\. It is planned anew"):
            step(work.batch)


def test_another_mode_is_warned_about() -> None:
    model = nn.Sequential(layers(width=16), nn.BatchNorm1d(16), nn.Dropout(0.2), layers(width=16))
    work = work_of(model, torch.randn(256, 16))
    with apply(plan(work, "75%", engine="graph"), work) as step:
        step.loss(work.batch).backward()
        model.eval()
        with pytest.warns(RuntimeWarning, match="not the one that was planned"):
            value = step.loss(work.batch)
        assert torch.equal(value, squares(model, work.batch))
