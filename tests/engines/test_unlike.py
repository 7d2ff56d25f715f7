"""Steps unlike those of the zoo, planned for little memory: their budgets, their bits, and what is said of others."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import lowtide
from lowtide import Workload
from lowtide.engines import apply, plan
from lowtide.errors import PlanError, TraceError, WorkloadError
from lowtide.planning import Plan
from lowtide.techniques import Fidelity
from lowtide.tracing.fake.kernels import FIXES

from ..soak import SOAK, in_soak
from .planned import smallest_budget

Loss = Callable[[nn.Module, Any], Tensor]


def layers(count: int = 4, width: int = 24) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(count)))


def workload(loss: Loss, model: nn.Module | None = None, *shape: int) -> Workload:
    model = model or layers()
    batch = torch.randn(*(shape or (96, 24)))
    return Workload(model, loss, batch, torch.optim.SGD(model.parameters(), lr=0.1))


def smallest(work: Workload, *, engine: Any = "auto", allow: str = "roundoff") -> Plan:
    before = lowtide.profile(work)
    budget = smallest_budget(work, before, engine, allow)
    return plan(work, budget, profile=before, engine=engine, allow=allow, tune=False)


class Heads(nn.Module):
    """Two heads, whose losses are summed one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.one, self.two = layers(), nn.Linear(24, 8), nn.Linear(24, 8)


def of_two_heads(model: Any, x: Tensor) -> Tensor:
    hidden = model.trunk(x)
    return model.one(hidden).square().mean() + model.two(hidden).tanh().square().mean()


def in_the_middle(model: Any, x: Tensor) -> Tensor:
    total = x.new_zeros(())
    for layer in model:
        x = layer(x)
        total = total + x.square().mean()
    return total


@pytest.mark.parametrize(("loss", "model"), [(of_two_heads, Heads), (in_the_middle, layers)])
def test_losses_that_are_summed_on_the_way(loss: Loss, model: Callable[[], nn.Module]) -> None:
    work = workload(loss, model())
    found = smallest(work, engine="graph")
    assert found.engine == "graph"
    checked = lowtide.verify(work, found)
    assert checked.ok, str(checked)


LOSSES: dict[str, Loss] = {
    "mse": lambda m, x: F.mse_loss(m(x), x),
    "smooth_l1": lambda m, x: F.smooth_l1_loss(m(x), x),
    "soft_margin": lambda m, x: F.soft_margin_loss(m(x), x.sign()),
    "bce": lambda m, x: F.binary_cross_entropy(m(x).sigmoid(), (x > 0).float()),
}


@pytest.mark.parametrize("name", LOSSES)
def test_results_in_storages_larger_than_they_are_count(name: str) -> None:
    work = workload(LOSSES[name], layers(width=64), 2048, 64)
    for found in (smallest(work, engine="graph"), *([plan(work, "80%", engine="graph", tune=False)] if SOAK else [])):
        checked = lowtide.verify(work, found)
        assert checked.ok, str(checked)
        assert checked.storage_peak_bytes == checked.plan.storage_peak_bytes


def test_modules_that_the_loss_holds_count() -> None:
    teacher = nn.Sequential(nn.Linear(24, 1024), nn.Linear(1024, 24)).requires_grad_(False)
    work = workload(lambda m, x: (m(x) - teacher(x)).square().mean())
    checked = lowtide.verify(work, smallest(work, engine="graph"))
    assert checked.ok, str(checked)


MASK = torch.rand(2048, 64)
MASKS = torch.rand(3, 2048, 64)


class Masked(nn.Module):
    """A layer with a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.mask = layers(width=64), torch.rand(2048, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) * self.mask


@pytest.mark.parametrize("fake", [False, True])
@pytest.mark.parametrize(
    ("loss", "model"),
    [
        (lambda m, x: (m(x) * MASK).square().mean(), partial(layers, width=64)),
        (lambda m, x: m(x).square().mean(), Masked),
        (lambda m, x: (m(x) * MASKS[1]).square().mean(), partial(layers, width=64)),
    ],
    ids=["global", "attribute", "view"],
)
def test_tensors_that_are_neither_in_the_model_nor_in_the_batch_count(
    loss: Loss, model: Callable[[], nn.Module], fake: bool
) -> None:
    work = workload(loss, model(), 2048, 64)
    labels = "held beside model and batch", "Masked.mask"
    held = [s for s in lowtide.profile(work, fake=fake).graph.storages if s.label in labels]
    assert [(s.category, s.birth) for s in held] == [("buffer", 0)]
    assert held[0].bytes in (MASK.nbytes, MASKS.nbytes)
    checked = lowtide.verify(work, smallest(work, engine="eager" if fake else "graph", allow="bitwise"))
    assert checked.ok, str(checked)
    assert checked.storage_peak_bytes == checked.plan.storage_peak_bytes


def branching(model: nn.Module, x: Tensor) -> Tensor:
    hidden = model(x)
    return torch.cond(hidden.sum() > 0, torch.sin, torch.cos, (hidden,)).mean()


def of_gradients(model: nn.Module, x: Tensor) -> Tensor:
    def inner(parameters: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, parameters, (x,)).square().mean()

    return sum(g.square().sum() for g in torch.func.grad(inner)(dict(model.named_parameters())).values())  # pyright: ignore[reportReturnType]


def by_sample(model: nn.Module, x: Tensor) -> Tensor:
    return torch.vmap(lambda row: model(row).square().mean())(x).mean()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch.cond compiles, and looks
@pytest.mark.parametrize(("loss", "engine"), [(branching, "eager"), (of_gradients, "graph"), (by_sample, "graph")])
def test_control_flow_and_function_transforms(loss: Loss, engine: str) -> None:
    work = workload(loss)
    found = smallest(work, engine=engine, allow="bitwise")
    assert found.engine == engine
    assert found.peak_bytes < found.baseline.peak_bytes
    checked = lowtide.verify(work, found)
    assert checked.ok, str(checked)


class Normalised(nn.Module):
    """Layers whose results torch's fake kernels lay out otherwise than real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(6))
        self.norms = nn.ModuleList(nn.BatchNorm1d(24) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = torch.tanh(norm(layer(x).transpose(1, 2))).transpose(1, 2)
        return x


def test_results_that_fake_kernels_lay_out_otherwise() -> None:
    work = workload(lambda m, x: F.mse_loss(m(x), x), Normalised(), 16, 8, 24)
    checked = lowtide.verify(work, smallest(work, engine="graph"))
    assert checked.ok, str(checked)
    assert checked.storage_peak_bytes == checked.plan.storage_peak_bytes


class Branches(nn.Module):
    """Modules in the branches of torch.cond, as it is mostly used."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.one, self.two = layers(), nn.Linear(24, 24), nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layers(x)
        return torch.cond(hidden.sum() > 0, lambda h: self.one(h).sin(), lambda h: self.two(h).cos(), (hidden,))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_a_branch_with_modules_is_profiled_for_real_and_not_predicted() -> None:
    work = workload(lambda m, x: m(x).square().mean(), Branches())
    assert lowtide.profile(work).peak_bytes > 0
    with pytest.raises(TraceError, match=r"cond whole, on real tensors alone.*Leave out fake=True"):
        lowtide.profile(work, fake=True)


@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
def test_resampling_is_captured_as_the_plain_step_has_it(mode: str) -> None:
    torch.manual_seed(0)
    last = torch.channels_last
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.AvgPool2d(2), nn.GroupNorm(4, 8), nn.SiLU(),
        nn.Upsample(scale_factor=2, mode=mode), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 1),
    ).to(memory_format=last)  # fmt: skip
    batch = torch.randn(4, 3, 32, 32).contiguous(memory_format=last)
    work = Workload(model, lambda m, x: F.mse_loss(m(x), x), batch)
    found = smallest(work, engine="graph")
    assert found.program is not None
    assert found.fidelity is Fidelity.BITWISE
    checked = lowtide.verify(work, found)
    assert checked.ok, str(checked)


def test_kernels_that_do_otherwise_than_torch_says_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    work = workload(LOSSES["mse"], layers(width=64), 2048, 64)
    monkeypatch.delitem(FIXES, torch.ops.aten.mse_loss.default)
    with pytest.raises(PlanError, match="mse_loss gives another result here than torch says"):
        plan(work, "80%", engine="graph", tune=False)


WINDOW = torch.hann_window(16)
SPECTRA: dict[str, Loss] = {
    "rfft2": lambda m, x: torch.fft.rfft2(m(x)).abs().mean(),
    "ihfft": lambda m, x: torch.fft.ihfft(m(x)).abs().mean(),
    "stft": lambda m, x: torch.stft(m(x), 16, window=WINDOW, return_complex=True).abs().mean(),
}


@pytest.mark.parametrize("name", ["rfft2", "stft", *in_soak(["ihfft"])])
def test_spectra_take_what_was_planned_when_captured_again_too(name: str) -> None:
    for _ in range(2):  # torch's cache of fake results forgets the storages
        work = workload(SPECTRA[name], layers(width=64), 2048, 64)
        checked = lowtide.verify(work, smallest(work, engine="graph"))
        assert checked.ok, str(checked)
        assert checked.storage_peak_bytes == checked.plan.storage_peak_bytes


@pytest.mark.parametrize(
    "loss",
    [
        lambda m, x: m(x)[x > 0].square().sum(),
        lambda m, x: m(x)[(x[:, 0] > 0).nonzero().flatten()].square().sum(),
    ],
    ids=["mask", "nonzero"],
)
def test_what_no_program_can_be_made_of_is_planned_as_it_runs(loss: Loss) -> None:
    work = workload(loss)
    found = smallest(work, allow="bitwise")
    assert found.engine == "eager"
    assert lowtide.verify(work, found).ok


def test_kernels_that_torch_describes_otherwise_in_some_versions_are_planned_either_way() -> None:
    work = workload(lambda m, x: torch.linalg.inv(m(x).T @ m(x) + torch.eye(24)).square().mean())
    checked = lowtide.verify(work, smallest(work, allow="bitwise"))
    assert checked.ok, str(checked)
    assert checked.storage_peak_bytes == checked.plan.storage_peak_bytes


@torch.library.custom_op("lowtide_tests::noisy", mutates_args=())
def noisy(x: Tensor) -> Tensor:
    """Draws without saying so, as ops of other libraries do."""
    return x + torch.randn_like(x)


noisy.register_fake(torch.empty_like)
noisy.register_autograd(lambda ctx, gradient: gradient)


def test_ops_of_other_libraries_may_draw_random_numbers() -> None:
    def loss(model: Any, x: Tensor) -> Tensor:
        for layer in model:
            x = noisy(layer(x))
        return x.square().mean()

    work = workload(loss)
    found = smallest(work, engine="graph", allow="bitwise")
    assert found.program is not None
    assert found.program.ops_again > 0
    checked = lowtide.verify(work, found)
    assert checked.ok, str(checked)


def test_a_step_that_looks_at_its_values_goes_on_with_another_shape() -> None:
    seen: list[float] = []

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        value = model(x).square().mean()
        seen.append(value.item())
        return value

    work = workload(loss)
    step = apply(plan(work, "60%", engine="graph", tune=False), work)
    step(work.batch)
    step(torch.randn(40, 24))  # the planned schedule, on smaller results
    with pytest.warns(RuntimeWarning, match=r"the batch is float32\[120, 24\]"):
        step(torch.randn(120, 24))


def test_the_users_own_error_comes_out() -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        if x.shape[0] == 7:
            raise ValueError("seven is not for us")
        return model(x).square().mean()

    work = workload(loss)
    step = apply(plan(work, "60%", engine="graph", tune=False), work)
    step(work.batch)
    with pytest.raises(ValueError, match="seven is not for us"):
        step(torch.randn(7, 24))
    step(work.batch)


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.calls: Tensor

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(x)
        self.calls += 1
        return x


def test_a_buffer_that_counts_in_place() -> None:
    work = workload(lambda m, x: m(x).square().mean(), Counter())
    assert lowtide.verify(work, smallest(work, engine="graph")).ok


def test_what_is_no_workload_is_refused_with_what_to_write() -> None:
    model: Any = layers()
    for call in (lambda: lowtide.plan(model, "50%"), lambda: lowtide.profile(model)):
        with pytest.raises(WorkloadError, match=r"not a Workload.*lowtide\.Workload\(model"):
            call()


def test_a_batch_with_a_graph_is_refused_before_that_is_used_up() -> None:
    encoder = nn.Linear(24, 24)
    batch = encoder(torch.randn(96, 24))
    work = Workload(layers(), lambda m, x: m(x).square().mean(), batch)
    with pytest.raises(WorkloadError, match="Detach it"):
        plan(work, "75%", tune=False)
    batch.sum().backward()
    assert encoder.weight.grad is not None


@pytest.fixture(scope="module")
def eager() -> tuple[Workload, Plan]:
    work = workload(lambda m, x: m(x).square().mean())
    return work, smallest(work, engine="eager", allow="bitwise")


@pytest.mark.parametrize("trees", [[1], [[True]], [[[]]], ["ab"], [[0, "1"]], [[[1.5]]], [[[0, 1], None]]])
def test_a_plan_with_malformed_trees_is_refused(trees: Any, eager: tuple[Workload, Plan]) -> None:
    work, found = eager
    data = found.to_json()
    option = data["choices"][0]["option"]
    option["config"]["trees"] = trees
    with pytest.raises(PlanError):
        apply(Plan.from_json(data), work)


def test_a_step_under_a_dispatch_mode_runs_as_it_is_and_the_next_one_is_planned() -> None:
    work = workload(lambda m, x: m(x).square().mean())
    step = apply(plan(work, "60%", engine="graph", tune=False), work)
    with FlopCounterMode(display=False) as counter, pytest.warns(RuntimeWarning, match="A dispatch mode looks"):
        step(work.batch)
    assert counter.get_total_flops() > 0
    assert step(work.batch).isfinite()
    assert step.profile().storage_peak_bytes == step.plan.storage_peak_bytes
