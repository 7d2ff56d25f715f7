"""Steps that do more than return a loss: buffers and parameters that they write to, results that nobody uses."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from lowtide import Workload, apply, plan, verify
from lowtide.engines import Step
from lowtide.errors import PlanError
from tests.engines.planned import squares, work_of


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
    "constants": Constants,
    "spectral norm": spectral,
    "no affine": without_affine,
    "largest norm": lambda: nn.Sequential(nn.Embedding(50, 16, max_norm=1.0), *layers()),
}


@pytest.mark.parametrize("share", ["75%", "60%"])
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
    with pytest.raises(PlanError, match="random numbers that nothing uses"):
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


def test_another_mode_is_warned_about() -> None:
    model = nn.Sequential(*layers(), nn.BatchNorm1d(16), nn.Dropout(0.2), *layers())
    work = work_of(model, torch.randn(256, 16))
    with apply(plan(work, "75%", engine="graph"), work) as step:
        step.loss(work.batch).backward()
        model.eval()
        with pytest.warns(RuntimeWarning, match="not the one that was planned"):
            value = step.loss(work.batch)
        assert torch.equal(value, squares(model, work.batch))
