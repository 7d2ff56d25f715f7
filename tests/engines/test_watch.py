"""A planned step warns before it could go over its budget: other batches, gradients and parameters."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowtide.engines import Step, apply, plan
from lowtide.engines import shapes as shapes_module
from lowtide.profiling import Profile, profile
from lowtide.workload import Workload
from tests.models import attention, squares
from tests.refusals import warned

from ..planning.steps import chain
from ..tracing.allocator import allocated_peak
from .counting import Counter


def stack(**changes: Any) -> Workload:
    torch.manual_seed(0)
    model = nn.Sequential(*(attention() for _ in range(4)))
    return replace(Workload(model, squares, torch.randn(16, 16, 8)), **changes)


def eager(work: Workload, budget: int | str = "70%") -> Step:
    return apply(plan(work, budget, engine="eager", tune=False), work)


# -- batches -------------------------------------------------------------------------------------------


def test_a_batch_as_large_by_another_shape_is_warned_about_with_its_peak() -> None:
    work = stack()
    with eager(work) as step:
        long = torch.randn(1, 256, 8)
        with warned("float32[1, 256, 8]", "float32[16, 16, 8]"):
            step(long)
        peak = allocated_peak(work.model, lambda _, batch: step.loss(batch), long, None)
        assert peak > 2 * step.plan.budget_bytes  # it was right to warn; and only once


def test_a_batch_that_is_smaller_in_every_dimension_is_not_even_predicted(predictions: list[Any]) -> None:
    with eager(stack()) as step:
        for shape in ((16, 16, 8), (4, 16, 8), (16, 3, 8)):
            step(torch.randn(shape))
    assert predictions == []


def test_a_larger_batch_that_fits_is_silent_and_predicted_once(predictions: list[Any]) -> None:
    with eager(stack(), "100%") as step:
        for _ in range(2):
            step(torch.randn(2, 17, 8))
            step(torch.randn(1, 17, 8))  # smaller than one that fits
    assert len(predictions) == 1


def test_another_dtype_is_another_batch(predictions: list[Any]) -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x.float()).square().mean() + x.square().mean().float()

    wide = torch.randn(16, 16, 8, dtype=torch.float64)
    with (
        eager(stack(loss=loss), "100%") as step,
        warned("float64[16, 16, 8]"),
    ):
        step(wide)
    assert len(predictions) == 1


def test_a_batch_that_cannot_be_predicted_is_warned_about() -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean() * (1 if x.sum().item() else 2)

    work = stack(loss=loss)
    with eager(work) as step, warned("float32[1, 17, 8]"):
        step(torch.randn(1, 17, 8))


def test_batches_that_keep_changing_are_not_predicted_for_ever(
    predictions: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    large = profile(stack(batch=torch.randn(4, 64, 8)), fake=True)

    def counted(work: Workload, **_: Any) -> Profile:
        predictions.append(work)
        return large

    monkeypatch.setattr(shapes_module, "profile", counted)
    with eager(stack(), "100%") as step, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for length in range(40, 60):
            step(torch.randn(4, length, 8))
    assert len(predictions) == 8
    assert sum("does not fit" in str(each.message) for each in warned) == 8
    assert sum("more than 8" in str(each.message) for each in warned) == 1
    assert len(warned) == 9


def test_a_prediction_leaves_gradients_weights_and_generators_alone() -> None:
    work = stack(optimizer=None)
    twin = [p.clone() for p in work.model.parameters()]
    with eager(work, "200%") as step:
        step.loss(work.batch).backward()
        before, state = [p.grad.clone() for p in work.model.parameters()], torch.get_rng_state()
        step.loss(torch.randn(1, 20, 8, generator=torch.Generator()))
        assert torch.equal(torch.get_rng_state(), state)
        assert all(map(torch.equal, before, (p.grad for p in work.model.parameters())))
        assert all(map(torch.equal, twin, work.model.parameters()))


@dataclass
class Sample:
    x: Tensor
    name: str = "a"


@dataclass(slots=True)
class Slotted:
    x: Tensor


class Held:
    def __init__(self, x: Tensor) -> None:
        self.inner = {"x": Sample(x)}
        self.itself = self

    @property
    def x(self) -> Tensor:
        return self.inner["x"].x


def of_attribute(model: nn.Module, batch: Any) -> Tensor:
    return model(batch.x).square().mean()


@pytest.mark.parametrize("kind", [Sample, Slotted, Held])
def test_tensors_inside_an_object_are_watched_too(kind: Any) -> None:
    work = stack(loss=of_attribute, batch=kind(torch.randn(16, 16, 8)))
    with eager(work) as step:
        assert "float32[16, 16, 8]" in step.plan.fingerprint.batch
        with warned("float32[1, 256, 8]"):
            step(kind(torch.randn(1, 256, 8)))


def test_a_batch_without_tensors_cannot_be_watched_and_says_so_once() -> None:
    def loss(model: nn.Module, batch: Iterator[Tensor]) -> Tensor:
        return model(torch.ones(8, 16, 8)).square().mean()

    with eager(stack(loss=loss, batch=iter(()))) as step:
        with warned("tuple_iterator"):
            step(iter(()))
        step(iter(()))


# -- gradients -----------------------------------------------------------------------------------------


@pytest.fixture
def heavy() -> Workload:
    """Weights, and with them gradients, that weigh as much as activations."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Tanh()) for _ in range(8)))
    return Workload(model, squares, torch.randn(128, 64))


def test_gradients_that_are_there_before_are_warned_about_once_and_rightly(heavy: Workload) -> None:
    step = eager(heavy, "85%")
    step.loss(heavy.batch).backward()
    gradients = sum(p.grad.nbytes for p in heavy.model.parameters())
    held = sum(p.nbytes for p in heavy.model.parameters()) + heavy.batch.nbytes + gradients
    with Counter() as counter:
        with warned(f"{gradients} bytes", "set_to_none=True"):
            value = step.loss(heavy.batch)
        value.backward()
    assert step.plan.budget_bytes < held + counter.peak_bytes <= step.plan.peak_bytes + gradients
    step.loss(heavy.batch).backward()


def test_accumulation_within_the_budget_is_silent(heavy: Workload) -> None:
    with eager(heavy, "150%") as step:
        for _ in range(3):
            step.loss(heavy.batch).backward()


def test_accumulation_over_parts_of_the_planned_batch_is_silent(heavy: Workload) -> None:
    with eager(heavy, "100%") as step:
        for part in heavy.batch.chunk(4):
            step.loss(part).backward()


def test_an_optimizer_of_a_part_leaves_gradients_that_are_warned_about(heavy: Workload) -> None:
    head = heavy.model[-1]
    step = eager(replace(heavy, optimizer=torch.optim.SGD(head.parameters(), lr=0.1)), "85%")
    step(heavy.batch)
    with warned("Gradients"):
        step(heavy.batch)


@pytest.mark.filterwarnings("ignore:A step took:RuntimeWarning")  # as foreseen
def test_parameters_unfrozen_after_planning_are_warned_about_once(heavy: Workload) -> None:
    frozen = heavy.model[:6].requires_grad_(False)
    step = eager(heavy, "100%")
    step(heavy.batch)
    frozen.requires_grad_(True)
    with warned("0.0.weight, 0.0.bias, 1.0.weight and 9 more", "frozen"):
        step(heavy.batch)
    heavy.model.zero_grad()
    step(heavy.batch)


def test_nothing_is_watched_after_undo() -> None:
    work = chain()
    step = eager(work)
    step.undo()
    step.loss(torch.randn(4096, 16)).backward()
    step.loss(torch.randn(4096, 16)).backward()


def test_parameters_that_are_replaced_are_let_go_and_their_successors_watched(heavy: Workload) -> None:
    step = eager(heavy, "85%")
    before = [weakref.ref(parameter) for parameter in heavy.model.parameters()]
    heavy.model.load_state_dict({k: v.clone() for k, v in heavy.model.state_dict().items()}, assign=True)
    gc.collect()
    assert not any(reference() is not None for reference in before)
    step.loss(heavy.batch).backward()
    with warned("Gradients"):
        step.loss(heavy.batch)
