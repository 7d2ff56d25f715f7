"""Few-bit activations as a technique: the contract on curves, what it prices, what it refuses."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lowtide.errors import LowtideError
from lowtide.nn import fewbit
from lowtide.planning import predict
from lowtide.planning.prediction import estimate_peak
from lowtide.profiling import profile
from lowtide.techniques import Fidelity, techniques
from lowtide.techniques.fewbit import FewBitActivations, keep_few_bits, measure_inputs
from lowtide.workload import Workload
from tests.contract.contract import SeveralModels
from tests.contract.outcomes import run
from tests.refusals import refused
from tests.soak import SOAK


def build(model, *shape):
    batch = (torch.randn(*shape), torch.randint(5, (shape[0],)))
    return Workload(model, lambda m, b: F.cross_entropy(m(b[0]).flatten(1), b[1]), batch)


def smooth():
    """One of many kinds, in place too, with a gate among them."""
    kinds = [nn.GELU(), nn.SiLU(inplace=True), nn.GELU("tanh"), nn.ReLU(), nn.Mish(), nn.Softplus(beta=2)]
    layers = []
    for kind in kinds:
        layers += [nn.Linear(32, 32, bias=False), nn.BatchNorm1d(32), kind, nn.Dropout(0.1)]
    return build(nn.Sequential(*layers, nn.Linear(32, 5)), 24, 32)


def images():
    return build(
        nn.Sequential(
            nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.GELU(), nn.Dropout(0.1),
            nn.Conv2d(8, 8, 3), nn.Hardswish(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(48, 5),
        ), 6, 3, 9, 10,
    )  # fmt: skip


WORKS = {"smooth": smooth, "images": images}


def make(name):
    torch.manual_seed(0)
    return replace(WORKS[name](), name=f"fewbit {name}")


MODELS = {name: partial(make, name) for name in WORKS}


class TestFewBit(SeveralModels):
    models = MODELS

    @pytest.fixture
    def technique(self):
        return techniques()["fewbit"]


@pytest.mark.parametrize("name", WORKS)
def test_the_price_of_a_layer_is_its_bytes(name):
    work = make(name)
    plain = profile(work, fake=True)
    technique = FewBitActivations()
    options = technique.options(plain)
    for option in options if SOAK else (options[0], options[-3]):  # the exact ones alone, and 3 bits
        price = technique.price(option, plain)
        after = predict(work, [option], plain)
        codes = sum(i.bytes for i in price.added if i.why.startswith("codes"))
        let_go = sum(i.bytes for i in price.removed) - codes
        assert plain.saved_bytes - after.saved_bytes == let_go
        assert estimate_peak(plain.graph, [price]) == pytest.approx(
            after.peak_bytes, rel=0.05
        )  # what packing takes is counted roughly


def test_three_bits_keep_three_of_thirty_two():
    work = build(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 5)), 8, 16)
    plain = profile(work)
    option = next(o for o in FewBitActivations().options(plain) if o.config.bits == 3)
    with FewBitActivations().apply(work, [option]):
        after = profile(work)
    assert plain.saved_bytes - after.saved_bytes == 8 * 64 * 4 - 8 * 64 * 3 // 8


@pytest.mark.parametrize("layers", [[nn.ReLU()], [nn.Tanh()], [fewbit.GELU(), nn.Dropout(0.1)]])
def test_what_the_next_layer_keeps_anyway_or_is_in_few_bits_already_is_not_offered(layers):
    work = build(nn.Sequential(nn.Linear(16, 64), *layers, nn.Linear(64, 5)), 8, 16)
    assert not FewBitActivations().options(profile(work))


def test_exact_ones_are_an_option_of_their_own():
    work = make("smooth")
    plain = profile(work)
    exact, *others = FewBitActivations().options(plain)
    assert exact.site == ("14",)
    assert FewBitActivations().check(exact).fidelity is Fidelity.BITWISE
    assert all(FewBitActivations().check(option).fidelity is Fidelity.APPROXIMATE for option in others)
    bounds = [FewBitActivations().check(option).rtol for option in others]
    assert bounds == sorted(bounds)
    assert bounds[0] < 0.05 < bounds[-1]


def test_fewer_bits_are_further_from_the_plain_gradients():
    work = make("smooth")
    expected = run(work)
    errors = []
    for option in FewBitActivations().options(profile(work))[1::2]:
        with FewBitActivations().apply(work, [option]):
            actual = run(work)
        assert torch.equal(actual["loss 0"], expected["loss 0"])
        difference = sum(float((actual[n] - expected[n]).norm() ** 2) for n in expected if n.endswith(".grad"))
        errors.append(math.sqrt(difference / sum(float(g.norm() ** 2) for n, g in expected.items() if "grad" in n)))
    assert errors == sorted(errors)
    assert errors[0] < 0.02


def test_all_activations_of_a_model_by_hand():
    work = make("smooth")
    before = {path: module.__dict__.get("forward") for path, module in work.model.named_modules()}
    with keep_few_bits(work.model, bits=2) as undo:
        assert undo is not None
        assert sum("forward" in module.__dict__ for module in work.model.modules()) == 6
        with pytest.raises(LowtideError) as twice:
            keep_few_bits(work.model)
        assert "FewBitForward" in str(twice.value)
    assert {path: module.__dict__.get("forward") for path, module in work.model.named_modules()} == before
    with refused("no activation"):
        keep_few_bits(nn.Linear(2, 2))


def test_measured_inputs_make_better_slopes():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8))
    with torch.no_grad():
        model[0].weight.mul_(0.3)  # inputs near 0, far from a standard normal density
    x = torch.randn(512, 64)
    seen = measure_inputs(model, lambda: model(x))
    assert torch.equal(seen["1"], model[0](x).detach().flatten()[:: 512 * 256 // len(seen["1"])])

    (expected,) = torch.autograd.grad(model(x).square().sum(), model[0].weight)

    def error(density):
        with keep_few_bits(model, 3, density=density):
            (gradient,) = torch.autograd.grad(model(x).square().sum(), model[0].weight)
        return float((gradient - expected).norm())

    assert error(seen) < 0.7 * error("normal")


def test_inputs_given_by_keyword_are_measured():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.act = nn.GELU()

        def forward(self, x):
            return self.act(input=x)

    model, x = Named(), torch.randn(8)
    assert torch.equal(measure_inputs(model, lambda: model(x))["act"], x)
    with keep_few_bits(model):
        assert torch.equal(model(x), F.gelu(x))


def test_a_forward_of_somebody_else_is_not_replaced():
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
    model[1].forward = lambda x: x
    with pytest.raises(LowtideError) as taken:
        keep_few_bits(model)
    assert "function" in str(taken.value)


def test_a_number_changed_after_is_respected():
    model = nn.Sequential(nn.Linear(4, 4), nn.ELU(), nn.Linear(4, 4))
    with keep_few_bits(model):
        model[1].alpha = 0.3
        x = torch.randn(5, 4)
        actual = model(x)
    assert torch.equal(actual, model(x))
