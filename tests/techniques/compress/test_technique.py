"""Compressed activations as a technique: bits by layer, prices, and a model that learns with it."""

import gc
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lowtide import Workload, profile
from lowtide.errors import PlanError
from lowtide.nn import compress as nn_compress
from lowtide.planning.prediction import estimate_peak, predict
from lowtide.techniques.compress import Compress, measure_layers
from lowtide.techniques.compress.technique import CompressConfig
from lowtide.techniques.technique import Fidelity, Option, Price
from tests.contract.contract import TechniqueContract
from tests.contract.workloads import WORKLOADS, moved
from tests.models import squares
from tests.soak import in_soak
from tests.techniques.compress.steps import gpt2


class TestContract(TechniqueContract):
    """On convolutions: the model on which ``tests/contract`` runs three options has nothing to compress."""

    @pytest.fixture(params=["last"])
    def position(self, request: pytest.FixtureRequest) -> str:
        return request.param

    @pytest.fixture
    def technique(self) -> Compress:
        return Compress()

    @pytest.fixture
    def work(self, device: str) -> Workload:
        return moved(WORKLOADS["convnet"](), device)


def stored_bytes(price: Price) -> int:
    return sum(each.bytes for each in price.added if not each.why.startswith("temporaries"))


def test_prices_are_exact_where_temporaries_are_not_at_the_peak():
    work, technique = gpt2(), Compress()
    plain = profile(work)
    for option in technique.options(plain)[1:2]:
        actual = predict(work, [option], plain)
        price = technique.price(option, plain)
        assert price.fidelity is Fidelity.APPROXIMATE
        assert estimate_peak(plain.graph, [price]) == pytest.approx(actual.peak_bytes, rel=0.05)
        removed = sum(i.bytes for i in price.removed)
        assert actual.saved_bytes == plain.saved_bytes - removed + stored_bytes(price)


class Sharp(nn.Module):
    """Ops whose inputs stay as they are: a fused attention of three layers' outputs, and a log-sum of few rows."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(32, 32) for _ in range(4))

    def forward(self, x):
        h = x + self.out(torch.tanh(x))
        q, k, v = (layer(h).view(-1, 16, 2, 16).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q.square(), k, v).transpose(1, 2).reshape(-1, 16, 32)
        return torch.logsumexp(self.out(mixed).flatten(1), -1)


def test_what_attention_and_log_sums_read_is_priced_and_measured_as_kept():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), Sharp())
    work, technique = Workload(model, lambda m, b: m(b).sum(), torch.randn(8, 16, 32)), Compress()
    plain = profile(work)
    layers = technique.layers(plain)
    measured = measure_layers(work, [layer.path for layer in layers])
    assert [(m.path, m.kept_bytes) for m in measured] == [(layer.path, layer.kept_bytes) for layer in layers]
    option = technique.options(plain)[-1]
    with technique.apply(work, [option]) as applied:
        gc.collect()
        before = {id(each) for each in gc.get_objects() if type(each) is nn_compress._SharedCodes}
        loss = applied.work.compute_loss()
        actual = [
            each for each in gc.get_objects() if type(each) is nn_compress._SharedCodes and id(each) not in before
        ]
    assert stored_bytes(technique.price(option, plain)) == sum(record._codes.unpack().nbytes for record in actual) > 0
    del loss


def test_options_go_from_eight_bits_to_two_with_mixtures_between():
    technique, plain = Compress(), profile(gpt2())
    options = technique.options(plain)
    stored = [stored_bytes(technique.price(option, plain)) for option in options]
    assert stored == sorted(stored, reverse=True)
    assert [set(option.config.bits) for option in options] == [{8}, {8, 4}, {4}, {4, 2}, {2}]
    rtols = [technique.check(option).rtol for option in options]
    assert rtols == sorted(rtols)


def test_bits_that_do_not_fit_the_sites_are_refused():
    refused = {
        "bits=(4, 4)": lambda: Option("compress", ("blocks.0",), CompressConfig((4, 4))),
        "bits=(3,)": lambda: CompressConfig((3,)),
        "group=0": lambda: CompressConfig((4,), group=0),
    }
    for name, make in refused.items():
        with pytest.raises(PlanError) as error:
            make()
        assert name in str(error.value)


def test_a_model_learns_as_well_in_four_bits():
    def train(bits):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 4))
        teacher = nn.Linear(32, 4)
        x = torch.randn(512, 32)
        work = Workload(model, lambda m, b: F.cross_entropy(m(b[0]), b[1]), (x, teacher(x).argmax(1)))
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        sites = tuple(str(i) for i in range(5))
        options = [Option("compress", sites, CompressConfig((bits,) * 5))] if bits else []
        with Compress().apply(work, options) as applied:
            for _ in range(60):
                optimizer.zero_grad()
                applied.work.compute_loss().backward()
                optimizer.step()
        return float(work.compute_loss().detach())

    plain = train(0)
    assert plain < 0.1
    assert train(4) < 0.15
    for bits in in_soak([8]):
        assert train(bits) == pytest.approx(plain, abs=0.02)


def test_a_compiled_model_is_right():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    work = Workload(model, squares, torch.randn(64, 64))
    expected = torch.autograd.grad(work.compute_loss(), list(model.parameters()))
    option = Option("compress", ("1", "2"), CompressConfig((8, 8)))
    with Compress().apply(work, [option]) as applied:
        compiled = torch.compile(model, backend="aot_eager")
        loss = replace(applied.work, model=compiled).compute_loss()
        actual = torch.autograd.grad(loss, list(model.parameters()))
    for a, b in zip(actual, expected, strict=True):
        assert float((a - b).norm() / b.norm()) < 0.02
