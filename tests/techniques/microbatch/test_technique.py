"""Microbatch as a technique: beside the others, on two ranks, priced and planned."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lowtide
from lowtide import Workload, zoo
from lowtide.errors import BudgetError
from lowtide.planning.prediction import estimate_peak, predict
from lowtide.profiling import Profile
from lowtide.techniques import Fidelity, Option, Technique, techniques
from lowtide.techniques.microbatch import technique as technique_module
from lowtide.techniques.registry import measure, study
from lowtide.techniques.sqrt import checkpoint_segments

from ...contract.contract import StepContract
from ...contract.outcomes import assert_restored, snapshot
from ...ranks import on_two_ranks
from ...soak import count
from .steps import (
    Outcome,
    Scale,
    assert_same,
    cross_entropy,
    in_float64,
    masked_mean,
    mlp,
    names,
    normed,
    step,
    without_randomness,
)

pytestmark = pytest.mark.filterwarnings("ignore:The model has batch norms in training:UserWarning")


_proved: dict[tuple[str, str], Profile] = {}


class TestContract(StepContract):
    """Without random numbers and statistics of batches, pieces are the plain step but for roundoff."""

    name = "microbatch"

    @pytest.fixture
    def plain(self, work: Workload) -> Profile:
        key = work.name, work.device.type
        if key not in _proved:
            _proved[key] = lowtide.profile(work)
            study(work, _proved[key])
        return _proved[key]

    def test_its_fidelity_is_roundoff(self, technique: Technique, option: Option) -> None:
        assert technique.check(option).fidelity is Fidelity.ROUNDOFF


# -- with the other techniques -------------------------------------------------------------------------


def test_converted_batch_norms_give_what_plain_ones_give_in_pieces() -> None:
    """As a loop that accumulates gives it, by plain PyTorch."""
    work = in_float64(zoo.small("resnet18", batch=6))
    x, y = work.batch
    by_hand: Outcome = {}
    for i in (0, 3):
        part = step(replace(work, batch=(x[i : i + 3], y[i : i + 3])))
        for name, value in part.items():
            if name.endswith(".grad"):
                by_hand[name] = by_hand.get(name, 0) + value / 2
    assert_same({n: v for n, v in step(lowtide.microbatch(work, 3)).items() if n in by_hand}, by_hand)
    plain = step(lowtide.microbatch(work, 3))
    for joins in (1, 2):
        with lowtide.convert(work.model, joins=joins):
            assert_same(step(lowtide.microbatch(work, 3)), plain, rtol=1e-9)


def test_recomputed_segments_inside_pieces_change_nothing() -> None:
    work = mlp(6)
    expected = step(lowtide.microbatch(work, 2))
    with checkpoint_segments(work.model):
        recomputed = step(lowtide.microbatch(work, 2))
    assert all(torch.equal(recomputed[name], value) for name, value in expected.items())


def test_a_checkpoint_inside_the_loss_moves_statistics_as_often_as_in_the_full_batch() -> None:
    from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

    work = normed(nn.BatchNorm2d(3))
    around = replace(work, loss=lambda m, b: checkpoint(cross_entropy, m, b, use_reentrant=False))
    with set_checkpoint_early_stop(False):  # or else a batch norm behind the last saved tensor runs but once
        expected, actual = step(around), step(lowtide.microbatch(around, 3))
    for name in ("0.running_mean", "0.running_var", "0.num_batches_tracked"):
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-12, atol=1e-14)


def _ddp_reduces_once(rank: int) -> None:
    work = mlp(8)
    x, y = (part[4 * rank : 4 * rank + 4] for part in work.batch)
    expected = step(work)
    model = DistributedDataParallel(work.model)
    pieces = lowtide.microbatch(replace(work, model=model, batch=(x, y)), 3)
    for _ in range(2):
        actual = step(pieces)
        for name, value in expected.items():
            if name.endswith(".grad"):
                torch.testing.assert_close(actual[f"module.{name}"], value, rtol=1e-12, atol=1e-15)


test_on_two_ranks = on_two_ranks(_ddp_reduces_once)


# -- the technique -------------------------------------------------------------------------------------


def spectral() -> Workload:
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), nn.Tanh())
    return Workload(model, lambda m, b: m(b).square().mean(), torch.randn(4, 8))


@pytest.mark.parametrize(
    ("make", "fidelity"),
    [
        (lambda: normed(nn.Dropout(), samples=4), Fidelity.UNBIASED),
        (lambda: mlp(4), Fidelity.ROUNDOFF),
        (lambda: normed(nn.BatchNorm2d(3), samples=4), Fidelity.CHANGED),
        (lambda: mlp(4, loss=Scale()), Fidelity.CHANGED),  # each piece counts as a call
        (spectral, Fidelity.CHANGED),  # its forward pass moves its vectors, in each piece again
    ],
)
def test_fidelity_is_of_this_model(make: Callable[[], Workload], fidelity: Fidelity) -> None:
    technique, work = techniques()["microbatch"], make()
    plain = lowtide.profile(work)
    study(work, plain)
    options = technique.options(plain)
    assert [option.config.size for option in options] == [2, 1]
    assert {technique.check(option).fidelity for option in options} == {fidelity}
    assert {technique.price(option, plain).fidelity for option in options} == {fidelity}


@pytest.mark.parametrize("fake", [False, True])
def test_a_step_that_was_not_captured_is_changed(fake: bool) -> None:
    technique, work = techniques()["microbatch"], mlp(4)
    plain = lowtide.profile(work, fake=fake)
    if fake:
        study(work, plain)
    assert {technique.price(option, plain).fidelity for option in technique.options(plain)} == {Fidelity.CHANGED}
    assert "captured" in technique.options(plain)[0].config.because


def tokens(loss: Callable[[nn.Module, tuple[Tensor, ...]], Tensor], *more: Tensor) -> Workload:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.Tanh())]
    batch = torch.randn(8, 16, 32), torch.randint(32, (8, 16)), *more
    return Workload(nn.Sequential(*layers), loss, batch)


def test_a_masked_mean_is_changed_where_it_is_allowed_and_warns_when_a_padded_batch_comes(
    only: Callable[..., None],
) -> None:
    """Its planned batch has no padding: only the ops show that a later one may."""
    only("microbatch")
    work = tokens(masked_mean, torch.ones(8, 16))
    plain = lowtide.profile(work)
    with names(pytest.raises(BudgetError), "microbatch", "changed"):
        lowtide.plan(work, "60%", profile=plain, engine="eager")
    plan = lowtide.plan(work, "60%", profile=plain, engine="eager", allow="microbatch")
    assert plan.fidelity is Fidelity.CHANGED
    assert "div mixes samples, or is not known not to" in str(plan.options[0])
    padded = torch.ones(8, 16)
    padded[:2, 4:] = 0
    with lowtide.apply(plan, work) as planned:
        planned.loss(work.batch)
        with names(pytest.warns(RuntimeWarning), "divides", "weight="):
            planned.loss((*work.batch[:2], padded))


def test_a_plan_for_an_unpadded_batch_is_verified_and_gives_a_padded_ones_gradients(
    only: Callable[..., None],
) -> None:
    only("microbatch")
    work = tokens(cross_entropy)
    plan = lowtide.plan(work, "60%", engine="eager")
    assert lowtide.verify(work, plan).ok
    assert [option.technique for option in plan.options] == ["microbatch"]
    assert plan.fidelity is Fidelity.ROUNDOFF
    x, y = work.batch
    y = y.clone()
    y[:3, 2:] = -100
    expected = step(in_float64(replace(work, batch=(x, y))))
    work.model.float()
    with lowtide.apply(plan, work) as planned:
        planned.loss((x, y)).backward()
        actual = {f"{name}.grad": p.grad for name, p in work.model.named_parameters()}
    assert_same({"loss": expected["loss"], **actual}, expected, rtol=1e-5)


def test_a_price_counts_what_every_piece_repeats() -> None:
    """Ops are launched and gradients added again in each: on small steps that is most of the time."""
    technique, work = techniques()["microbatch"], mlp(16)
    plain = lowtide.profile(work)
    ops = sum(op.phase != "optimizer" for op in plain.graph.ops)
    prices = {16 // o.config.size: technique.price(o, plain).seconds for o in technique.options(plain)}
    assert list(prices) == [2, 4, 8, 16]
    for pieces, seconds in prices.items():
        assert seconds >= (pieces - 1) * ops * 1e-5


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """A clock by which the plain step of 16 samples takes 1 s, a piece 0.1 s and 0.07 s for each sample."""
    timed: list[tuple[int, int]] = []

    def seconds(work: Workload) -> float:
        samples, size = len(work.batch[0]), getattr(work.loss, "size", 0)
        timed.append((samples, size))
        return samples / size * (0.1 + 0.07 * size) if size else 1.0

    monkeypatch.setattr(technique_module, "best_seconds", lambda *steps: [seconds(step) for step in steps])
    return timed


def test_a_price_is_measured_by_running_pieces(clock: list[tuple[int, int]]) -> None:
    technique, work = techniques()["microbatch"], mlp(16)
    plain = slowed(lowtide.profile(work), 100.0)
    measure("microbatch", work, plain)
    measure("microbatch", work, plain)  # the profile keeps the findings: nothing runs twice
    assert clock == [(16, 0), (16, 8), (2, 1)]
    prices = {option.config.size: technique.price(option, plain) for option in technique.options(plain)}
    assert {size: round(price.seconds, 6) for size, price in prices.items()} == {8: 32.0, 4: 52.0, 2: 92.0, 1: 172.0}
    assert {price.source for price in prices.values()} == {"measured"}


def slowed(profile: Profile, seconds: float) -> Profile:
    """The step with a loss that takes so long that the fixed costs of small ops are nothing beside."""
    share = seconds / sum(op.seconds for op in profile.graph.ops if op.phase != "optimizer")
    ops = (replace(op, seconds=op.seconds * share) for op in profile.graph.ops)
    return replace(profile, graph=replace(profile.graph, ops=tuple(ops)))


def test_measuring_changes_nothing() -> None:
    work = normed(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.Dropout())
    work = replace(work, optimizer=torch.optim.Adam(work.model.parameters()))
    work.compute_loss().backward()
    gradients = [p.grad.clone() for p in work.model.parameters() if p.grad is not None]
    before, state, plain = snapshot(work.model), torch.get_rng_state(), lowtide.profile(work)
    technique = techniques()["microbatch"]
    measure("microbatch", work, plain)
    assert technique.price(technique.options(plain)[0], plain).source == "measured"
    assert_restored(work.model, before)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(map(torch.equal, [p.grad for p in work.model.parameters() if p.grad is not None], gradients))


@pytest.mark.parametrize("fake", [True, False])
def test_a_plan_without_a_run_says_that_its_seconds_are_an_estimate(
    fake: bool, only: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*steps: Workload) -> list[float]:
        raise torch.OutOfMemoryError("the GPU is full")

    monkeypatch.setattr(technique_module, "best_seconds", full)
    only("microbatch")
    actual = lowtide.plan(mlp(64), "90%", engine="eager", allow="microbatch", fake=fake, tune=False)
    assert actual.options
    assert "The seconds of microbatch are an estimate: it was not run." in actual.notes


def test_only_a_permitted_contender_is_measured(clock: list[tuple[int, int]], only: Callable[..., None]) -> None:
    only("microbatch", "precision")
    work = normed(nn.BatchNorm2d(3), samples=16)
    for budget, allow in (("100%", "microbatch"), ("95%", "precision")):
        with contextlib.suppress(BudgetError):
            lowtide.plan(work, budget, engine="eager", allow=allow)
        assert not clock
    actual = lowtide.plan(work, "95%", engine="eager", allow="microbatch", tune=False)
    assert clock == [(16, 0), (16, 8), (2, 1)]
    assert not any("estimate" in note for note in actual.notes)


def test_pieces_that_run_slowly_are_not_planned(monkeypatch: pytest.MonkeyPatch, only: Callable[..., None]) -> None:
    only("microbatch", "sqrt")
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(5)))
    work = Workload(model, lambda model, x: model(x).square().mean(), torch.randn(64, 8))
    plain, chosen = lowtide.profile(work), list[str]()
    for seconds in (0.01, 10.0):
        monkeypatch.setattr(technique_module, "best_seconds", lambda *_, s=seconds: [1.0, s, s])
        profile = slowed(plain, 100.0)
        chosen.append(lowtide.plan(work, "80%", profile=profile, engine="eager", tune=False).options[0].technique)
    assert chosen == ["microbatch", "sqrt"]


def test_estimates_are_near_what_a_trace_gives() -> None:
    technique = techniques()["microbatch"]
    work = without_randomness(zoo.small("gpt2", batch=8, layers=2, width=64, seq=64))
    plain = lowtide.profile(work)
    for option in technique.options(plain)[:2]:
        estimate = estimate_peak(plain.graph, [technique.price(option, plain)])
        with technique.apply(work, [option]) as applied:
            assert estimate == pytest.approx(lowtide.profile(applied.work).peak_bytes, rel=0.05)


@pytest.mark.parametrize(
    "make", [lambda: mlp(7), lambda: zoo.small("lstm", batch=7), lambda: normed(nn.BatchNorm2d(3), samples=9)]
)
def test_peaks_alone_are_predicted_by_few_pieces_to_the_byte(make: Callable[[], Workload]) -> None:
    work = make()
    plain = lowtide.profile(work)
    smallest = techniques()["microbatch"].options(plain)[-1]
    whole, short = (predict(work, [smallest], plain, only_peaks=only) for only in (False, True))
    assert (short.peak_bytes, short.storage_peak_bytes) == (whole.peak_bytes, whole.storage_peak_bytes)
    assert len(short.graph.ops) < len(whole.graph.ops)


def test_a_predicted_step_on_a_gpu_that_is_not_here_has_pieces_too() -> None:
    work = without_randomness(zoo.small("gpt2", batch=8, layers=1, device="meta"))
    plain = lowtide.profile(work, device="h200")
    pieces = lowtide.profile(lowtide.microbatch(work, 2), device="h200")
    assert pieces.storage_peak_bytes < plain.storage_peak_bytes


def test_with_dropout_a_step_is_another_draw_of_the_same_distribution() -> None:
    """The gradient of a linear layer behind dropout: its mean and its variance over the draws are known."""
    torch.manual_seed(0)
    samples, width, p, draws = 6, 64, 0.5, count(500, soak=2000)
    x = torch.randn(samples, width, dtype=torch.float64)
    model = nn.Sequential(nn.Dropout(p), nn.Linear(width, 1, bias=False)).double()
    work = lowtide.microbatch(Workload(model, lambda m, x: m(x).mean(), x), 4)
    actual: list[Tensor] = []
    for _ in range(draws):
        model.zero_grad()
        work.compute_loss().backward()
        actual.append(model[1].weight.grad[0])
    drawn = torch.stack(actual)
    variance = p / (1 - p) * x.square().sum(0) / samples**2
    error = (variance.sum() / draws).sqrt()
    assert (drawn.mean(0) - x.mean(0)).norm() <= 3 * error
    assert float(drawn.var(0).sum()) == pytest.approx(float(variance.sum()), rel=0.1)


def test_a_batch_with_a_mask_that_was_not_planned_is_warned_about(only: Callable[..., None]) -> None:
    def loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        each, mask = model(batch["x"]).square().mean(-1), batch["mask"]
        return each.mean() if mask is None else (each * mask).sum() / mask.sum()

    only("microbatch")
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))
    work = Workload(model, loss, {"x": torch.randn(64, 16), "mask": None})
    step = lowtide.apply(lowtide.plan(work, "70%", engine="eager"), work)
    mask = torch.zeros(64).index_fill_(0, torch.arange(20), 1.0)
    with names(pytest.warns(RuntimeWarning), "parts", "weight="):
        step({"x": torch.randn(64, 16), "mask": mask})
