"""Models that keep tensors from one step to the next: planned as all their steps but the first."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide import Workload
from lowtide.engines import apply
from lowtide.planning import plan
from lowtide.planning.recomputation import recomputations

from ..tracing.allocator import allocated_peak_after_others
from .planned import smallest_budget

SHAPE = 1024, 64


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6)))
        self.kept: Any = None


class Table(Model):
    """Made in the first step, as of positions."""

    def forward(self, x: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = torch.arange(x.numel(), dtype=x.dtype).view(x.shape).cos()
        return self.layers(x) * self.kept


class Tables(Model):
    """One for each size."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = {}

    def forward(self, x: Tensor) -> Tensor:
        if len(x) not in self.kept:
            self.kept[len(x)] = torch.arange(x.numel(), dtype=x.dtype).view(x.shape).sin()
        return self.layers(x) * self.kept[len(x)]


class Features(Model):
    """Of the last step, to be looked at."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(x)
        self.kept = x.detach()
        return x


class Memory(Model):
    """Each step reads what the one before left."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(x)
        x = x if self.kept is None else x + 0.1 * self.kept
        self.kept = x.detach().exp()
        return x


class Queue(Model):
    """A buffer that is a view after the first step, and that backward reads when it is replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.randn(*SHAPE))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(x)
        similar = x @ self.queue.T[:, :16]
        self.queue = torch.cat([x.detach()[:256], self.queue])[: SHAPE[0]]
        return similar


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def workload(model: nn.Module) -> Workload:
    return Workload(model, squares, torch.randn(*SHAPE), torch.optim.SGD(model.parameters(), lr=0.1))


def held(model: nn.Module) -> list[tuple[str, Any]]:
    return [(name, value) for module in model.modules() for name, value in vars(module).items()]


MODELS = [Table, Tables, Features, Memory, Queue]


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


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("engine", "share"), [("graph", 0.0), ("graph", 0.5), ("eager", 0.2)])
def test_a_plan_keeps_its_budget_from_the_second_step_on(model: type[Model], engine: Any, share: float) -> None:
    work = workload(model())
    twin, other = copy.deepcopy(work.model), copy.deepcopy(work.model)
    before = lowtide.profile(work)
    smallest = smallest_budget(work, before, engine, allow="bitwise")
    budget = smallest + int(share * (before.peak_bytes - smallest))
    found = plan(work, budget, profile=before, engine=engine, allow="bitwise")
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
    step = apply(plan(work, "60%", engine="graph"), work)
    with pytest.warns(RuntimeWarning, match="a first step, which makes what the model keeps"):
        step(work.batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(work.batch)


def test_tables_of_the_first_step_do_not_cost_a_plan_its_small_programs() -> None:
    work, after = workload(Table()), workload(Table())
    squares(after.model, after.batch).backward()
    found = [recomputations(each, lowtide.profile(each)) for each in (work, after)]
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
    found = plan(work, smallest_budget(work, lowtide.profile(work)), engine="graph")
    checked = lowtide.verify(work, found)
    assert checked.ok, str(checked)
    assert checked.storage_peak_bytes == found.storage_peak_bytes
