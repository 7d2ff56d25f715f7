"""Steps that change after planning are named for one reason, and run with plain PyTorch's bits."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.hooks import RemovableHandle

from lowtide import apply, plan
from lowtide.engines import Step
from lowtide.errors import WorkloadError
from tests.models import blocks, squares
from tests.refusals import refused, warned

from .planned import work_of

pytestmark = pytest.mark.filterwarnings(
    "ignore:The model ran in training mode outside:RuntimeWarning",  # for the plain losses
    "ignore:Gradients of .* exist before the step:RuntimeWarning",
)


def applied(model: nn.Module, loss: Callable[[Any, Any], Tensor] = squares) -> Step:
    work = work_of(model, torch.randn(96, 24), loss)
    return apply(plan(work, "80%", engine="graph", tune=False), work)


class Scaled(nn.Module):
    """Multiplies by a number of Python's, if it has one; fails if told to, or for seven samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(blocks(2), nn.Dropout(0.5))
        self.scale: float | None = None
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails or len(x) == 7:
            raise ValueError("not today")
        x = self.layers(x)
        return x if self.scale is None else x * self.scale


CHANGES: dict[str, Callable[[Any], Any]] = {
    "layers.1 is in evaluation mode now": lambda model: model.layers[1].eval(),
    "layers.0.1 has other hooks": lambda model: model.layers[0][1].register_forward_hook(lambda _, __, out: out * 2),
    "layers.0.0.0.weight is frozen now": lambda model: model.layers[0][0][0].weight.requires_grad_(False),
    "the loss runs other ops": lambda model: setattr(model, "scale", 3.0),
}


@pytest.mark.parametrize("cause", CHANGES)
def test_a_step_that_was_not_planned_is_said_to_be_another_for_one_reason(cause: str) -> None:
    step = applied(Scaled())
    CHANGES[cause](step.model)
    torch.manual_seed(1)
    with warned(cause):
        value = step.loss(step.work.batch)
    torch.manual_seed(1)
    assert torch.equal(value, squares(step.model, step.work.batch))


def test_a_number_that_changes_at_each_step_is_warned_about_and_counts() -> None:
    model = Scaled()
    model.scale = 1.0
    step = applied(model.eval())

    def anneal() -> None:
        for turn in range(12):
            model.scale = 1 + turn / 10
            assert torch.equal(step.loss(step.work.batch), squares(model, step.work.batch))

    with warned("as many values") as seen:
        anneal()
    assert "as many values" in str(seen[-1].message)


HOOKS: list[Callable[[nn.Module], RemovableHandle]] = [
    lambda module: module.register_forward_hook(lambda _, __, out: out * 2),
    lambda module: module.register_forward_pre_hook(lambda _, given: tuple(2 * x for x in given)),
    lambda module: register_module_forward_hook(lambda each, _, out: out * 2 if each is module else None),
]


def test_hooks_that_come_and_go_after_the_first_step_count() -> None:
    step = applied(blocks())
    model, batch = step.model, step.work.batch
    step(batch)
    for register in HOOKS:
        hook = register(model[2])
        with warned("planned anew"):
            value = step.loss(batch)
        assert torch.equal(value, squares(model, batch))
        hook.remove()
        assert torch.equal(step.loss(batch), squares(model, batch))


def test_a_step_that_trains_nothing_any_more_is_refused_in_words() -> None:
    step = applied(blocks())
    step(step.work.batch)
    step.model.requires_grad_(False)
    with pytest.raises(WorkloadError):
        step.loss(step.work.batch)


def test_a_model_that_is_no_longer_one_graph_runs_as_it_is_and_says_so_once() -> None:
    step = applied(blocks())
    model, batch = step.model, step.work.batch
    step(batch)
    model[3].register_forward_hook(lambda _, __, out: out if out.sum() > 0 else -out)
    with warned("engine='eager'"):
        value = step.loss(batch)
    with warnings.catch_warnings(action="error"):
        assert torch.equal(step.loss(batch), value)
    assert torch.equal(squares(model, batch), value)


def test_a_step_is_planned_as_before_after_one_that_failed() -> None:
    step = applied(Scaled())
    model: Any = step.model
    step(step.work.batch)
    model.fails = True
    with refused("not today", kind=ValueError):
        step(step.work.batch)
    model.fails = False
    with refused("not today", kind=ValueError):
        step(torch.randn(7, 24))
    step(step.work.batch)
    assert step.profile().storage_peak_bytes == step.plan.storage_peak_bytes


def test_a_step_that_looks_at_its_values_goes_on_with_another_shape() -> None:
    seen: list[float] = []

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        value = squares(model, x)
        seen.append(value.item())
        return value

    step = applied(blocks(), loss)
    step(step.work.batch)
    step(torch.randn(40, 24))  # the planned schedule, on smaller results
    with warned("float32[120, 24]"):
        step(torch.randn(120, 24))
