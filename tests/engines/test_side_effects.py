"""Steps that do more than return a loss: buffers and parameters that they write to, results that nobody uses."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrizations
from torch.utils.hooks import RemovableHandle

from lowtide import Workload, apply, plan, verify
from lowtide.engines import Step
from lowtide.errors import PlanError, WorkloadError
from lowtide.profiling import profile
from tests.engines.counting import Counter
from tests.engines.planned import alive, smallest_budget, squares, work_of
from tests.soak import in_soak

pytestmark = pytest.mark.filterwarnings("ignore:The model ran in training mode outside:RuntimeWarning")  # plain losses


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def layers(count: int = 4) -> list[nn.Module]:
    return [layer for _ in range(count) for layer in (nn.Linear(16, 16), nn.Tanh())]


class Average(nn.Module):
    """Reads a buffer, then moves it."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Sequential(*layers()), nn.Sequential(*layers())
        self.register_buffer("average", torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        x = x - self.average.clone()
        self.average.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return self.after(x)


class Unused(nn.Module):
    """Runs a layer whose result goes nowhere."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.first, self.layer, self.rest = nn.Linear(16, 16), layer, nn.Sequential(*layers(), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        self.layer(x)
        return self.rest(x)


class Clamped(nn.Module):
    """Writes to a parameter before it is used."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers(6))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.layers.get_parameter("0.weight").clamp_(-0.1, 0.1)
        return self.layers(x)


class Signs(nn.Module):
    """Has a parameter whose gradient is zeros that no bytes hold."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.signs = nn.Sequential(*layers(6)), nn.Parameter(torch.randn(256, 16))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) * self.signs.sgn()


class Constants(nn.Module):
    """Makes tensors of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers())

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) * torch.tensor([[1.0] * 16] * 64).repeat(4, 1)
        return x


def spectral() -> nn.Module:
    made = [parametrizations.spectral_norm(layer) if isinstance(layer, nn.Linear) else layer for layer in layers()]
    return nn.Sequential(*made)


def without_affine() -> nn.Module:
    return nn.Sequential(
        *(m for _ in range(4) for m in (nn.Linear(16, 16), nn.BatchNorm1d(16, affine=False), nn.ReLU()))
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "average": Average,
    "unused batch norm": lambda: Unused(nn.BatchNorm1d(16)),
    "clamped": Clamped,
    "signs": Signs,
    "constants": Constants,
    "spectral norm": spectral,
    "no affine": without_affine,
    "largest norm": lambda: nn.Sequential(nn.Embedding(50, 16, max_norm=1.0), *layers()),
}


@pytest.mark.parametrize("share", ["60%", *in_soak(["75%"])])
@pytest.mark.parametrize("name", MODELS)
def test_a_planned_step_leaves_what_the_plain_one_leaves(name: str, share: str) -> None:
    torch.manual_seed(0)
    batch = torch.randint(0, 50, (256,)) if name == "largest norm" else torch.randn(256, 16)
    work = work_of(MODELS[name](), batch)
    found = plan(work, share, engine="graph")
    assert found.program is not None
    checked = verify(work, found)
    assert checked.ok, str(checked)
    assert checked.storage_peak_bytes == found.storage_peak_bytes


def test_numbers_that_are_drawn_for_nothing_are_drawn_all_the_same() -> None:
    work = work_of(Unused(nn.Dropout(0.5)), torch.randn(256, 16))
    with pytest.raises(PlanError, match="draws random numbers that nothing uses"):
        plan(work, "60%", engine="graph")


def test_sparse_gradients_and_compiled_models_are_refused_in_words() -> None:
    sparse = nn.Sequential(nn.Embedding(50, 16, sparse=True), *layers())
    with pytest.raises(PlanError, match="sparse tensors"):
        plan(work_of(sparse, torch.randint(0, 50, (256,))), "60%", engine="graph")
    compiled = torch.compile(nn.Sequential(*layers()), backend="eager")
    work = Workload(compiled, squares, torch.randn(256, 16))  # pyright: ignore[reportArgumentType]
    with pytest.raises(PlanError, match="is compiled"):
        plan(work, "60%", engine="graph")


class Annealed(nn.Module):
    """Multiplies by a number of Python's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.beta = nn.Sequential(*layers()), 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) * self.beta


def test_a_number_that_changes_at_each_step_is_warned_about_and_counts() -> None:
    model = Annealed()
    work = work_of(model, torch.randn(256, 16))

    def anneal(step: Step) -> None:
        for turn in range(12):
            model.beta = 1 + turn / 10
            assert torch.equal(step.loss(work.batch), squares(model, work.batch))

    said = "as many values|not the one that was planned"
    with apply(plan(work, "75%", engine="graph"), work) as step, pytest.warns(RuntimeWarning, match=said) as seen:
        anneal(step)
    assert "as many values" in str(seen[-1].message)


HOOKS: dict[str, Callable[[nn.Module], RemovableHandle]] = {
    "after": lambda module: module.register_forward_hook(lambda _, __, out: out * 2),
    "before": lambda module: module.register_forward_pre_hook(lambda _, given: tuple(2 * x for x in given)),
    "of all": lambda module: register_module_forward_hook(lambda each, _, out: out * 2 if each is module else None),
}


@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_that_comes_and_goes_after_the_first_step_counts(name: str) -> None:
    model = nn.Sequential(*layers())
    work = work_of(model, torch.randn(256, 16))
    with apply(plan(work, "75%", engine="graph"), work) as step:
        step(work.batch)
        hook = HOOKS[name](model[2])
        with pytest.warns(RuntimeWarning, match="not the one that was planned"):
            value = step.loss(work.batch)
        assert torch.equal(value, squares(model, work.batch))
        hook.remove()
        assert torch.equal(step.loss(work.batch), squares(model, work.batch))


class Remembering(nn.Module):
    """Keeps what its layers give, as some do for a loss on features."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers(6))
        self.seen: list[Any] = [None] * 6

    def forward(self, x: Tensor) -> Tensor:
        for place in range(6):
            x = self.layers[2 * place + 1](self.layers[2 * place](x))
            self.seen[place] = x.detach()
        return x


def test_what_a_model_keeps_of_its_forward_pass_counts_from_one_step_to_the_next() -> None:
    torch.manual_seed(0)
    model = Remembering()
    work = Workload(model, squares, torch.randn(256, 16))
    before = profile(work)
    found = plan(work, smallest_budget(work, before), profile=before, engine="graph")
    checked = verify(work, found)
    assert checked.ok, str(checked)
    squares(model, work.batch)
    expected = list(model.seen)
    model.seen = [None] * 6
    held = sum(tensor.nbytes for tensor in alive(work))
    with apply(found, work) as step:
        step.loss(work.batch)  # compiles
        model.seen = [None] * 6
        with Counter() as counter:
            for _ in range(3):
                model.zero_grad()
                step.loss(work.batch).backward()
        assert held + counter.peak_bytes == found.storage_peak_bytes
    assert all(map(torch.equal, model.seen, expected))  # and backward has written over none of it


def test_a_step_that_trains_nothing_any_more_is_refused_in_words() -> None:
    model = nn.Sequential(*layers())
    work = Workload(model, squares, torch.randn(256, 16))
    with apply(plan(work, "75%", engine="graph"), work) as step:
        step(work.batch)
        model.requires_grad_(False)
        with pytest.raises(WorkloadError, match="The loss has no graph"):
            step.loss(work.batch)


def test_a_model_that_is_no_longer_one_graph_runs_as_it_is_and_says_so_once() -> None:
    model = nn.Sequential(*layers())
    work = Workload(model, squares, torch.randn(256, 16))
    with apply(plan(work, "75%", engine="graph"), work) as step:
        step(work.batch)
        model[3].register_forward_hook(lambda _, __, out: out if out.sum() > 0 else -out)
        with pytest.warns(RuntimeWarning, match=r"no longer captured as one graph.*engine='eager'"):
            found = step.loss(work.batch)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert torch.equal(step.loss(work.batch), found)
        assert torch.equal(squares(model, work.batch), found)


class Strict(nn.Module):
    """A model that can be told to fail."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.fails = nn.Sequential(*layers()), False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise ValueError("not today")
        return self.layers(x)


def test_a_step_is_planned_as_before_after_one_that_failed() -> None:
    work = Workload(Strict(), squares, torch.randn(256, 16))
    found = plan(work, "75%", engine="graph")
    with apply(found, work) as step:
        step(work.batch)
        work.model.fails = True
        with pytest.raises(ValueError, match="not today"):
            step(work.batch)
        work.model.fails = False
        step(work.batch)
        assert step.profile().storage_peak_bytes == found.storage_peak_bytes
