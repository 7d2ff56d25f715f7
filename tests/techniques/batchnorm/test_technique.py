"""Batch norm + activation as a technique: the contract, and what its prices promise."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from lowtide import zoo
from lowtide.engines import plan, verify
from lowtide.errors import PlanError
from lowtide.nn import BatchNormAct2d
from lowtide.planning import estimate_peak, predict
from lowtide.profiling import profile
from lowtide.techniques import Fidelity, Option, techniques
from lowtide.techniques.batchnorm import convert
from lowtide.techniques.batchnorm.technique import BatchNorm, BatchNormConfig, _TracedPairs
from lowtide.workload import Workload
from tests.models import squares

from ...contract.contract import SeveralModels
from ...contract.outcomes import assert_agree, run
from ...soak import in_soak


class Joined(nn.Module):
    """The end of a residual block, with an activation that keeps its input."""

    def __init__(self, width: int, act: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.LeakyReLU(0.1)
        )
        self.last = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(self.last(self.body(x))) + x)


def residual(act: type[nn.Module] = nn.ReLU, depth: int = 6) -> Workload:
    torch.manual_seed(0)
    stem = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU())
    model = nn.Sequential(stem, *(Joined(6, act()) for _ in range(depth)), nn.Conv2d(6, 2, 1))
    return Workload(model, squares, torch.randn(8, 3, 12, 10), name=f"residual {act.__name__}")


RESIDUAL = {"residual relu": residual, "residual silu": lambda: residual(nn.SiLU)}


class TestBatchNorm(SeveralModels):
    """On what has joins; ``tests/contract`` runs the suite on the other workloads."""

    models = RESIDUAL

    @pytest.fixture
    def technique(self) -> BatchNorm:
        actual = techniques()["batchnorm"]
        assert isinstance(actual, BatchNorm)
        return actual


def test_it_offers_every_pair_that_saves_and_one_option_for_each_spacing_of_joins() -> None:
    one, two, four = BatchNorm().options(profile(residual(), fake=True))
    inner = ("0.1", *(f"{i}.body.1" for i in range(1, 7)))
    assert one.site == inner  # ReLU's output is kept at every join, as in the plain step
    assert set(two.site) == {*inner, "1.norm", "3.norm", "5.norm"}
    assert set(four.site) == {*inner, *(f"{i}.norm" for i in (1, 2, 3, 5, 6))}
    assert [option.config.joins for option in (one, two, four)] == [1, 2, 4]


@pytest.mark.parametrize("layer", [nn.ReLU(), nn.BatchNorm2d(4)])
def test_without_a_batch_norm_that_saves_there_is_nothing_to_offer(layer: nn.Module) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), layer, nn.MaxPool2d(2))
    work = Workload(model, lambda m, x: m(x).sum(), torch.randn(2, 3, 8, 8))
    assert not BatchNorm().options(profile(work))


@pytest.mark.parametrize("name", ["lenet", *in_soak(["densenet121", "resnet18", "unet", "wrn38"])])
def test_the_estimate_from_the_price_is_near_the_traced_peak(name: str) -> None:
    work = zoo.small(name)
    plain = profile(work, fake=True)
    technique = BatchNorm()
    for option in technique.options(plain):
        estimate = estimate_peak(plain.graph, [technique.price(option, plain)])
        assert estimate == pytest.approx(predict(work, [option], plain).peak_bytes, rel=0.02)


def test_removed_bytes_are_the_outputs_that_are_no_longer_kept() -> None:
    """One buffer of each ReLU behind a batch norm; of each leaky ReLU, which keeps its input, two."""
    work = residual(depth=2)
    plain = profile(work, fake=True)
    one = BatchNorm().options(plain)[0]
    full = 4 * work.batch.shape[0] * 6 * 12 * 10
    assert [interval.bytes for interval in BatchNorm().price(one, plain).removed] == [full] * (1 + 2 * 2)
    with BatchNorm().apply(work, [one]):
        after = profile(work, fake=True)
    per_channel = sum(s.bytes for s in plain.saved if len(s.shape) == 1)
    assert plain.saved_bytes - after.saved_bytes == pytest.approx(5 * full, abs=per_channel)


def test_a_plan_may_choose_it_and_its_promise_holds(only) -> None:
    only("batchnorm")
    work = residual()
    planned = plan(work, "80%", tune=False)
    assert planned.options[0].technique == "batchnorm"
    assert planned.fidelity is Fidelity.ROUNDOFF
    assert planned.peak_bytes <= planned.budget_bytes
    assert verify(work, planned).ok


def test_a_plan_for_a_gpu_that_is_not_here_may_choose_it(only) -> None:
    only("batchnorm")
    work = zoo.workload("wrn28-2", batch=32, device="meta")
    planned = plan(work, "80%", device="h200", tune=False)
    assert planned.options[0].technique == "batchnorm"
    assert planned.peak_bytes < planned.baseline.peak_bytes
    assert not any("left out" in note for note in planned.notes)


@pytest.mark.parametrize("name", ["lenet", *in_soak(["resnet18"])])
def test_the_tolerance_holds_for_another_rounding(name: str) -> None:
    """On a CPU "auto" runs torch's own kernels, bit for bit, which says nothing about a tolerance; x̂ kept does."""
    work = zoo.small(name)
    expected = run(work)
    with convert(work.model, "checkpoint_xhat"):
        actual = run(work)
    assert any(not torch.equal(actual[key], value) for key, value in expected.items())
    assert_agree(actual, expected, BatchNorm().check(Option("batchnorm", (), BatchNormConfig())))


def test_the_spacing_of_joins_reaches_the_layers() -> None:
    work = residual()
    one, two, _ = BatchNorm().options(profile(work, fake=True))
    for option, rebuilt in ((one, [False] * 6), (two, [True, False] * 3)):
        with BatchNorm().apply(work, [option]):
            norms = [work.model.get_submodule(f"{i}.norm") for i in range(1, 7)]
            assert [norm.rebuild_joins for norm in norms if isinstance(norm, BatchNormAct2d)] == rebuilt


@pytest.mark.parametrize("joins", [0, "many", 1.5])
def test_a_spacing_that_is_no_number_of_blocks_is_refused(joins: int | str | float) -> None:
    with pytest.raises(PlanError) as refusal:
        BatchNormConfig(joins)
    assert "joins" in str(refusal.value)


class InPlace(nn.Module):
    """A residual block that adds and activates in place, with a shortcut where the width changes."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(width, out, 3, padding=1), nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = nn.Sequential(nn.Conv2d(width, out, 1), nn.BatchNorm2d(out)) if width != out else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.norm(self.conv(x))
        out += x if self.shortcut is None else self.shortcut(x)
        return self.relu(out)


@pytest.mark.parametrize("joins", [2, 4])
def test_joins_in_place_are_counted_as_convert_counts_them(joins: int) -> None:
    widths = [4, 4, 4, 4, 6, 6, 6, 6, 6, 6]
    blocks = [InPlace(width, out) for width, out in itertools.pairwise(widths)]
    model = nn.Sequential(nn.Conv2d(3, 4, 3), *blocks)
    work = Workload(model, squares, torch.randn(2, 3, 8, 8))
    counted = {p.path: p.rebuilds(joins) for p in _TracedPairs(profile(work).graph).pairs if p.is_join}
    with convert(model, joins=joins) as done:
        layers = {c.path: model.get_submodule(c.path) for c in done.changed if c.join}
        assert counted == {path: layer.rebuild_joins for path, layer in layers.items()}
    assert False in counted.values()
