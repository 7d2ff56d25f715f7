"""Models that keep tensors from one step to the next: planned as all their steps but the first."""

from __future__ import annotations

import copy
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import lowtide
from lowtide.engines import apply, plan
from lowtide.planning.graph_candidates import graph_candidates
from lowtide.tracing import tracer as capture
from lowtide.tracing.capture.loss import sharing_captures
from tests.refusals import warned

from ..soak import in_soak
from ..tracing.allocator import allocated_peak_after_others
from .keeping import MODELS, SHAPE, Features, Last, Memory, Model, Nested, Table, held, squares, workload
from .planned import verified, work_of


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("steps", [0, 2])
def test_a_profile_is_of_the_steady_step(model: type[Model], steps: int) -> None:
    work = workload(model())
    for _ in range(steps):
        squares(work.model, work.batch).backward()
    before = copy.deepcopy(held(work.model)[-1]), work.model.state_dict().keys()
    real, fake = lowtide.profile(work), lowtide.profile(work, fake=True)
    after = held(work.model)[-1], work.model.state_dict().keys()
    assert str(before) == str(after)
    assert real.storage_peak_bytes == fake.storage_peak_bytes
    if not steps:  # what was allocated before is not seen to go
        assert real.peak_bytes == allocated_peak_after_others(work.model, squares, work.batch, work.optimizer)


WAYS = [(model, "graph", 0.0) for model in MODELS if model is not Last] + [(Table, "eager", 0.2)]  # Last is as Features
LOOSER = [(model, engine, share) for model in MODELS for engine, share in (("graph", 0.5), ("eager", 0.2))]
LOOSER.append((Last, "graph", 0.0))


@pytest.mark.parametrize(("model", "engine", "share"), [*WAYS, *in_soak(LOOSER)])
def test_a_plan_keeps_its_budget_from_the_second_step_on(model: type[Model], engine: str, share: float) -> None:
    work = workload(model())
    twin, before = copy.deepcopy(work.model), str(held(work.model))
    with sharing_captures(work):
        with warnings.catch_warnings(action="error"):
            chosen = verified(work, engine=engine, allow="bitwise", share=share).plan
        assert str(held(work.model)) == before
        step = apply(chosen, work)
        with warnings.catch_warnings(record=True, action="always") as seen:
            peak = allocated_peak_after_others(
                work.model, lambda _, batch: step.loss(batch), work.batch, work.optimizer
            )
    assert peak <= chosen.budget_bytes
    said = [str(each.message) for each in seen]
    assert all("the model stores tensors on itself, as in a first step" in each for each in said)
    assert len(said) == (engine == "graph" and model in (Table, Memory, Nested))
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    losses: list[Tensor] = []
    for _ in range(4):
        optimizer.zero_grad()
        losses.append(squares(twin, work.batch))
        losses[-1].backward()
        optimizer.step()
    assert torch.equal(step(work.batch), losses[3].detach())
    left = ([t for t in tree_leaves((m.kept, *m.buffers())) if t is not None] for m in (work.model, twin))
    assert all(map(torch.equal, *left))  # backward has written over none of it


def test_tables_of_the_first_step_do_not_cost_a_plan_its_small_programs() -> None:
    work, after = workload(Table()), workload(Table())
    squares(after.model, after.batch).backward()
    first, later = (graph_candidates(each, lowtide.profile(each)).joint for each in (work, after))
    assert first.digest == later.digest
    assert not first.stored


ARRAY = np.random.default_rng(0).random(SHAPE, dtype=np.float32)
LOSSES = {
    "read by backward": lambda m, x: (m.layers(x) * torch.from_numpy(ARRAY)).square().mean(),
    "kept and read": lambda m, x: (m(x) + torch.from_numpy(ARRAY)).square().mean(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_numpy_arrays_count_as_long_as_a_captured_graph_holds_them(name: str) -> None:
    verified(work_of(Features(), torch.randn(*SHAPE), LOSSES[name]))


class Looking(Model):
    """Whose first step looks at values, and is no graph."""

    def forward(self, x: Tensor) -> Tensor:
        if self.kept is None:
            largest = x.detach().abs().max()
            self.kept = torch.ones(*SHAPE) * (largest if largest < 100 else 100.0)
        return self.layers(x) * self.kept


def test_a_first_step_that_is_not_captured_does_not_stand_in_the_way() -> None:
    work = workload(Looking())
    step = apply(verified(work).plan, work)
    with warned("captured"):
        step(work.batch)
    with warnings.catch_warnings(action="error"):
        step(work.batch)
        step(work.batch)


class Frozen(Model):
    """A frozen weight as large as what is kept, which is not what is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(*SHAPE), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(x * self.weight)
        self.kept = x.detach().exp()
        return x


def test_frozen_weights_are_not_taken_for_what_is_kept() -> None:
    verified(workload(Frozen()))


def test_a_plain_model_is_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Plain(Model):
        def forward(self, x: Tensor) -> Tensor:
            self.kept = x  # the batch's own
            return self.layers(x)

    runs: list[int] = []
    run = capture._run
    monkeypatch.setattr(capture, "_run", lambda *args, **how: runs.append(1) or run(*args, **how))
    lowtide.profile(workload(Plain()))
    assert len(runs) == 1
    lowtide.profile(workload(Features()))
    assert len(runs) == 3


def test_what_an_object_of_a_module_holds_and_no_step_uses_does_not_count() -> None:
    class Holding(Model):
        def __init__(self) -> None:
            super().__init__()
            self.kept = SimpleNamespace(samples=torch.zeros(4096, 4096))  # such as a data set

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x)

    assert lowtide.profile(workload(Holding())).peak_bytes < 4096 * 4096


class Average(Model):
    """Moved in place, and no buffer; and a tensor that is trained though it is no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = torch.zeros(*SHAPE)
        self.token = torch.randn(*SHAPE, requires_grad=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(x + self.token)
        with torch.no_grad():
            self.kept.mul_(0.9).add_(x.detach(), alpha=0.1)
        return x + self.kept


@pytest.mark.parametrize("engine", ["graph", "eager"])
def test_tensors_that_are_written_to_are_restored(engine: Any) -> None:
    model = Average()
    work = workload(model)
    checked = lowtide.verify(work, plan(work, "85%", engine=engine, allow="bitwise", tune=False))
    assert checked.results_agree, str(checked)
    assert not model.kept.any()
    assert model.token.grad is None


@pytest.mark.parametrize("model", MODELS)
def test_no_fake_tensors_are_left_behind(model: type[Model]) -> None:
    work = workload(model())
    plan(work, "90%", fake=True, allow="bitwise", engine="eager", tune=False)
    assert type(squares(work.model, work.batch)) is Tensor
    assert type(squares(work.model, work.batch)) is Tensor
