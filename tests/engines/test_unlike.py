"""Steps unlike those of the zoo, planned for little memory: their budgets, their bits, and what is said of others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import lowtide
from lowtide import Workload
from lowtide.engines import apply, plan
from lowtide.errors import PlanError, TraceError, WorkloadError
from lowtide.planning import Plan
from lowtide.tracing.fake.kernels import FIXES
from tests.models import Call, InTurn, blocks, squares
from tests.refusals import refused

from ..soak import in_soak
from .planned import assert_verified, smallest_plan, verified, work_of

Loss = Callable[[Any, Any], Tensor]


def step_of(loss: Loss = squares, model: nn.Module | None = None, *shape: int) -> Workload:
    torch.manual_seed(0)
    return work_of(model or blocks(), torch.randn(*(shape or (96, 24))), loss)


def wide(loss: Loss, model: nn.Module | None = None) -> Workload:
    """Results are large beside whatever else a step holds."""
    return step_of(loss, model or blocks(width=64), 2048, 64)


# -- models ----------------------------------------------------------------------------------------------


class Masked(nn.Module):
    """A layer with a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.mask = blocks(width=64), torch.rand(2048, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) * self.mask


def normalised() -> InTurn:
    """Layers whose results torch's fake kernels lay out otherwise than real ones."""
    pairs = (nn.ModuleList([nn.Linear(24, 24), nn.BatchNorm1d(24)]) for _ in range(3))
    return InTurn(*pairs, each=lambda pair, x: torch.tanh(pair[1](pair[0](x).transpose(1, 2))).transpose(1, 2))


class SideEffects(nn.Module):
    """Moves a buffer that it reads, counts its calls, makes constants, and drops a batch norm's result.

    It also has a batch norm without weights, and a parameter whose gradient is zeros that no bytes hold.
    """

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after, self.drop = blocks(2), blocks(2), nn.Dropout(0.1)
        self.unused, self.plain = nn.BatchNorm1d(24), nn.BatchNorm1d(24, affine=False)
        self.signs = nn.Parameter(torch.randn(96, 24))
        self.register_buffer("average", torch.ones(24))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        x = self.plain(self.before(x)) - self.average.clone()
        self.average.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        self.calls += 1
        self.unused(x)
        x = self.drop(x) * torch.tensor([[1.0] * 24] * 48).repeat(2, 1)
        return self.after(x) * self.signs.sgn()


def clamped(model: Any, x: Tensor) -> Tensor:
    """Writes to parameters before they are used."""
    with torch.no_grad():
        model.layers[0][0].weight.clamp_(-0.1, 0.1)
    return model.layers(model.words(x))


def resampled(mode: str) -> Workload:
    last = torch.channels_last
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.AvgPool2d(2), nn.GroupNorm(4, 8), nn.SiLU(),
        nn.Upsample(scale_factor=2, mode=mode), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 1),
    ).to(memory_format=last)  # fmt: skip
    return work_of(model, torch.randn(4, 3, 32, 32).contiguous(memory_format=last), LOSSES["mse"])


# -- losses ----------------------------------------------------------------------------------------------

MASK = torch.rand(2048, 64)
MASKS = torch.rand(3, 2048, 64)
LOSSES: dict[str, Loss] = {  # whose results are in storages larger than they are
    "mse": lambda m, x: F.mse_loss(m(x), x),
    "smooth_l1": lambda m, x: F.smooth_l1_loss(m(x), x),
    "soft_margin": lambda m, x: F.soft_margin_loss(m(x), x.sign()),
    "bce": lambda m, x: F.binary_cross_entropy(m(x).sigmoid(), (x > 0).float()),
}


def in_the_middle(model: Any, x: Tensor) -> Tensor:
    total = x.new_zeros(())
    for layer in model:
        x = layer(x)
        total = total + x.square().mean()
    return total


def of_a_teacher() -> Workload:
    teacher = nn.Sequential(nn.Linear(64, 512), nn.Linear(512, 64)).requires_grad_(False)
    return wide(lambda m, x: (m(x) * MASKS[1] - teacher(x)).square().mean(), Masked())


def of_gradients(model: nn.Module, x: Tensor) -> Tensor:
    def inner(parameters: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, parameters, (x,)).square().mean()

    return sum(g.square().sum() for g in torch.func.grad(inner)(dict(model.named_parameters())).values())  # pyright: ignore[reportReturnType]


def by_sample(model: nn.Module, x: Tensor) -> Tensor:
    return torch.vmap(lambda row: model(row).square().mean())(x).mean()


def branching(model: nn.Module, x: Tensor) -> Tensor:
    hidden = model(x)
    return torch.cond(hidden.sum() > 0, torch.sin, torch.cos, (hidden,)).mean()


@torch.library.custom_op("lowtide_tests::noisy", mutates_args=())
def noisy(x: Tensor) -> Tensor:
    """Draws without saying so, as ops of other libraries do."""
    return x + torch.randn_like(x)


noisy.register_fake(torch.empty_like)
noisy.register_autograd(lambda ctx, gradient: gradient)


def with_noise(model: Any, x: Tensor) -> Tensor:
    for layer in model:
        x = noisy(layer(x))
    return x.square().mean()


# -- plans -----------------------------------------------------------------------------------------------

STEPS: dict[str, Callable[[], Workload]] = {
    "losses on the way": lambda: step_of(in_the_middle),
    "mse": lambda: wide(LOSSES["mse"]),
    "tensors of other modules": of_a_teacher,
    "gradients": lambda: step_of(of_gradients, blocks(2)),
    "samples": lambda: step_of(by_sample, blocks(2)),
    "layouts": lambda: step_of(LOSSES["mse"], normalised(), 16, 8, 24),
    "bilinear": lambda: resampled("bilinear"),
    "noise": lambda: step_of(with_noise),
    "side effects": lambda: step_of(squares, SideEffects()),
    "weights written to": lambda: work_of(
        Call(clamped, words=nn.Embedding(50, 24, max_norm=1.0), layers=blocks()), torch.randint(0, 50, (96,))
    ),
    "spectral norm": lambda: step_of(
        squares, nn.Sequential(parametrizations.spectral_norm(nn.Linear(24, 24)), blocks())
    ),
}
MORE: dict[str, Callable[[], Workload]] = {
    "nearest": lambda: resampled("nearest"),
    **{name: lambda name=name: wide(LOSSES[name]) for name in ("smooth_l1", "soft_margin", "bce")},
}


@pytest.mark.parametrize("name", [*STEPS, *in_soak(MORE)])
def test_a_step_unlike_others_keeps_its_bits_and_its_bytes(name: str) -> None:
    allow = "roundoff" if name == "weights written to" else "bitwise"  # such a capture is not compared
    chosen = verified({**STEPS, **MORE}[name](), allow=allow).plan
    assert chosen.program is not None
    assert chosen.program.ops_again > 0


EAGER: dict[str, Loss] = {  # of which no program can be made
    "cond": branching,
    "mask": lambda m, x: m(x)[x > 0].square().sum(),
    "nonzero": lambda m, x: m(x)[(x[:, 0] > 0).nonzero().flatten()].square().sum(),
}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch.cond compiles, and looks
@pytest.mark.parametrize("name", EAGER)
def test_what_no_program_can_be_made_of_is_planned_as_it_runs(name: str) -> None:
    chosen = verified(step_of(EAGER[name]), engine="auto", allow="bitwise").plan
    assert chosen.engine == "eager"
    assert chosen.peak_bytes < chosen.baseline.peak_bytes


def test_kernels_that_torch_describes_otherwise_in_some_versions_are_planned_either_way() -> None:
    work = step_of(lambda m, x: torch.linalg.inv(m(x).T @ m(x) + torch.eye(24)).square().mean())
    verified(work, engine="auto", allow="bitwise")


HELD: dict[str, Callable[[], Workload]] = {
    "global": lambda: wide(lambda m, x: (m(x) * MASK).square().mean()),
    "view": lambda: wide(lambda m, x: (m(x) * MASKS[1]).square().mean()),
    "attribute": lambda: wide(squares, Masked()),
}


@pytest.mark.parametrize("name", HELD)
def test_tensors_that_are_neither_in_the_model_nor_in_the_batch_count(name: str) -> None:
    work = HELD[name]()
    labels = "held beside model and batch", "Masked.mask"
    for fake in (False, True):
        held = [s for s in lowtide.profile(work, fake=fake).graph.storages if s.label in labels]
        assert [(s.category, s.birth) for s in held] == [("buffer", 0)]
        assert held[0].bytes in (MASK.nbytes, MASKS.nbytes)


WINDOW = torch.hann_window(16)
SPECTRA: dict[str, Loss] = {
    "rfft2": lambda m, x: torch.fft.rfft2(m(x)).abs().mean(),
    "ihfft": lambda m, x: torch.fft.ihfft(m(x)).abs().mean(),
    "stft": lambda m, x: torch.stft(m(x), 16, window=WINDOW, return_complex=True).abs().mean(),
}


@pytest.mark.parametrize("name", ["stft", *in_soak(["rfft2", "ihfft"])])
def test_spectra_take_what_was_planned_when_captured_again_too(name: str) -> None:
    for _ in range(2):  # torch's cache of fake results forgets the storages
        work = step_of(SPECTRA[name], blocks(2, width=64), 2048, 64)
        assert_verified(work, smallest_plan(work))


# -- refusals --------------------------------------------------------------------------------------------


def with_branches(m: Any, x: Tensor) -> Tensor:
    """Modules in the branches of torch.cond, as it is mostly used."""
    hidden = m.layers(x)
    return torch.cond(hidden.sum() > 0, lambda h: m.one(h).sin(), lambda h: m.two(h).cos(), (hidden,))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_a_branch_with_modules_is_profiled_for_real_and_not_predicted() -> None:
    work = step_of(squares, Call(with_branches, layers=blocks(), one=nn.Linear(24, 24), two=nn.Linear(24, 24)))
    assert lowtide.profile(work).peak_bytes > 0
    with refused("cond", "fake=True", kind=TraceError):
        lowtide.profile(work, fake=True)


def test_kernels_that_do_otherwise_than_torch_says_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(FIXES, torch.ops.aten.mse_loss.default)
    with refused("mse_loss", kind=PlanError):
        plan(wide(LOSSES["mse"]), "80%", engine="graph", tune=False)


def test_sparse_gradients_and_compiled_models_are_refused_in_words() -> None:
    sparse = nn.Sequential(nn.Embedding(50, 24, sparse=True), blocks(1))
    with refused("sparse", kind=PlanError):
        plan(work_of(sparse, torch.randint(0, 50, (96,))), "60%", engine="graph")
    compiled: Any = torch.compile(blocks(1), backend="eager")
    with refused("compiled", kind=PlanError):
        plan(Workload(compiled, squares, torch.randn(96, 24)), "60%", engine="graph")


def test_what_is_no_workload_is_refused_with_what_to_write() -> None:
    model: Any = blocks()
    for call in (lambda: lowtide.plan(model, "50%"), lambda: lowtide.profile(model)):
        with refused("lowtide.Workload(model", kind=WorkloadError):
            call()


def test_a_batch_with_a_graph_is_refused_before_that_is_used_up() -> None:
    encoder = nn.Linear(24, 24)
    batch = encoder(torch.randn(96, 24))
    with refused("Detach", kind=WorkloadError):
        plan(work_of(blocks(), batch), "75%", tune=False)
    batch.sum().backward()
    assert encoder.weight.grad is not None


def test_a_plan_with_malformed_trees_is_refused() -> None:
    work = step_of()
    data = smallest_plan(work, engine="eager", allow="bitwise").to_json()
    for trees in ([1], [[True]], [[[]]], ["ab"], [[0, "1"]], [[[1.5]]], [[[0, 1], None]]):
        data["choices"][0]["option"]["config"]["trees"] = trees
        with pytest.raises(PlanError):
            apply(Plan.from_json(data), work)
