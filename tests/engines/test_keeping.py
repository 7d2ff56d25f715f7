"""Models that keep tensors from one step to the next: planned as all their steps but the first."""

from __future__ import annotations

import copy
import warnings
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide import Workload
from lowtide.engines import apply, plan
from lowtide.planning.graph_candidates import graph_candidates
from lowtide.tracing import tracer as capture

from ..soak import SOAK
from ..tracing.allocator import allocated_peak_after_others
from .keeping import MODELS, SHAPE, Features, Model, Table, held, squares, workload
from .planned import smallest_budget


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


TIGHT = list(product(MODELS, [("graph", 0.0)]))
LOOSER = list(product(MODELS, [("graph", 0.5), ("eager", 0.2)]))


@pytest.mark.parametrize(("model", "way"), [*TIGHT, *(LOOSER if SOAK else LOOSER[:2])])
def test_a_plan_keeps_its_budget_from_the_second_step_on(model: type[Model], way: tuple[Any, float]) -> None:
    engine, share = way
    work = workload(model())
    twin, other = copy.deepcopy(work.model), copy.deepcopy(work.model)
    before = lowtide.profile(work)
    smallest = smallest_budget(work, before, engine, allow="bitwise")
    budget = smallest + int(share * (before.peak_bytes - smallest))
    found = plan(work, budget, profile=before, engine=engine, allow="bitwise", tune=False)
    assert found.engine == engine
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checked = lowtide.verify(work, found)
    assert checked.ok, str(checked)
    assert checked.storage_peak_bytes == found.storage_peak_bytes
    assert str(held(work.model)) == str(held(other))
    step = apply(found, work)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The step is not the one that was planned")
        peak = allocated_peak_after_others(work.model, lambda _, batch: step.loss(batch), work.batch, work.optimizer)
    assert peak <= budget
    assert step.profile().storage_peak_bytes == found.storage_peak_bytes
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    losses: list[Tensor] = []
    for _ in range(5):
        optimizer.zero_grad()
        losses.append(squares(twin, work.batch))
        losses[-1].backward()
        optimizer.step()
    assert torch.equal(torch.stack([step(work.batch) for _ in range(2)]), torch.stack(losses[3:]).detach())


def test_the_first_step_says_that_it_is_another_one() -> None:
    work = workload(Table())
    step = apply(plan(work, "60%", engine="graph", tune=False), work)
    with pytest.warns(RuntimeWarning, match="the model stores tensors on itself, as in a first step"):
        step(work.batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(work.batch)


def test_tables_of_the_first_step_do_not_cost_a_plan_its_small_programs() -> None:
    work, after = workload(Table()), workload(Table())
    squares(after.model, after.batch).backward()
    found = [graph_candidates(each, lowtide.profile(each)) for each in (work, after)]
    assert found[0].joint.digest == found[1].joint.digest
    assert not found[0].joint.stored


ARRAY = np.random.default_rng(0).random(SHAPE, dtype=np.float32)
LOSSES = {
    "read by backward": lambda m, x: (m.layers(x) * torch.from_numpy(ARRAY)).square().mean(),
    "read by forward alone": lambda m, x: (m.layers(x) + torch.from_numpy(ARRAY)).square().mean(),
    "kept and read": lambda m, x: (m(x) * torch.from_numpy(ARRAY)).square().mean(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_numpy_arrays_count_as_long_as_a_captured_graph_holds_them(name: str) -> None:
    model = Features()
    work = Workload(model, LOSSES[name], torch.randn(*SHAPE), torch.optim.SGD(model.parameters(), lr=0.1))
    found = plan(work, smallest_budget(work, lowtide.profile(work)), engine="graph", tune=False)
    checked = lowtide.verify(work, found)
    assert checked.ok, str(checked)
    assert checked.storage_peak_bytes == found.storage_peak_bytes


class Looking(Model):
    """Whose first step looks at values, and is no graph."""

    def forward(self, x: Tensor) -> Tensor:
        if self.kept is None:
            largest = x.detach().abs().max()
            self.kept = torch.ones(*SHAPE) * (largest if largest < 100 else 100.0)
        return self.layers(x) * self.kept


def test_a_first_step_that_is_not_captured_does_not_stand_in_the_way() -> None:
    work = workload(Looking())
    found = plan(work, smallest_budget(work, lowtide.profile(work)), engine="graph", tune=False)
    assert lowtide.verify(work, found).ok
    step = apply(found, work)
    with pytest.warns(RuntimeWarning, match="no longer captured as one graph"):
        step(work.batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(work.batch)
        step(work.batch)
    assert step.profile().storage_peak_bytes == found.storage_peak_bytes


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
    work = workload(Frozen())
    found = plan(work, smallest_budget(work, lowtide.profile(work)), engine="graph", tune=False)
    checked = lowtide.verify(work, found)
    assert checked.ok, str(checked)
    assert checked.storage_peak_bytes == found.storage_peak_bytes


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
