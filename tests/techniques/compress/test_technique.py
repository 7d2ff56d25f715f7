"""Compressed activations as a technique: bits by layer, prices, and a model that learns with it."""

import gc
import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lowtide import Workload, profile, zoo
from lowtide.errors import LowtideError, PlanError
from lowtide.nn import compress as nn_compress
from lowtide.planning.prediction import apply_options, estimate_peak, predict
from lowtide.techniques.compress import Compress, Layer, allocate_bits, measure_layers
from lowtide.techniques.compress.technique import CompressConfig
from lowtide.techniques.sqrt import SqrtConfig
from lowtide.techniques.technique import Fidelity, Option
from tests.contract.contract import TechniqueContract
from tests.contract.workloads import WORKLOADS, moved

CHOICES = (2, 4, 8, 0)


class TestContract(TechniqueContract):
    """On convolutions: the model on which ``tests/contract`` runs three options has nothing to compress."""

    @pytest.fixture(params=["middle", "last"])
    def position(self, request: pytest.FixtureRequest) -> str:
        return request.param

    @pytest.fixture
    def technique(self) -> Compress:
        return Compress()

    @pytest.fixture
    def work(self, device: str) -> Workload:
        return moved(WORKLOADS["convnet"](), device)


def random_layers(seed: int, count: int = 5) -> list[Layer]:
    draw = torch.Generator().manual_seed(seed)
    layers = []
    for i in range(count):
        groups = int(torch.randint(1, 40, (), generator=draw))
        variance = float(10 ** (4 * torch.rand((), generator=draw)))
        layers.append(Layer(f"{i}", groups * 1024, (groups * 72, groups * 136, groups * 264), variance))
    return layers


def test_bits_are_those_that_trying_all_finds():
    for seed in range(30):
        layers = random_layers(seed)
        least = sum(layer.bytes(2) for layer in layers)
        most = sum(layer.kept_bytes for layer in layers)
        for share in (0.0, 0.05, 0.2, 0.5, 0.9, 1.0):
            budget = int(least + share * (most - least))
            found = allocate_bits(layers, budget)
            costs = {
                bits: sum(layer.cost(b) for layer, b in zip(layers, bits, strict=True))
                for bits in itertools.product(CHOICES, repeat=len(layers))
                if sum(layer.bytes(b) for layer, b in zip(layers, bits, strict=True)) <= budget
            }
            assert found in costs
            assert costs[found] == pytest.approx(min(costs.values()), rel=1e-12)


def test_a_budget_below_two_bits_is_refused_and_many_layers_are_no_matter():
    layers = random_layers(0)
    with pytest.raises(LowtideError, match="below what all layers take"):
        allocate_bits(layers, sum(layer.bytes(2) for layer in layers) - 1)
    many = random_layers(1, 200)
    budget = sum(layer.bytes(4) for layer in many)
    bits = allocate_bits(many, budget)
    assert sum(layer.bytes(b) for layer, b in zip(many, bits, strict=True)) <= budget
    assert sum(layer.cost(b) for layer, b in zip(many, bits, strict=True)) < 0.5 * sum(layer.cost(4) for layer in many)


def gpt2() -> Workload:
    torch.manual_seed(0)
    return zoo.workload("gpt2", layers=2, width=64, heads=2, vocab=64, batch=4, seq=32)


def test_measured_layers_count_the_bytes_that_are_stored():
    work, technique = gpt2(), Compress()
    plain = profile(work)
    layers = technique.layers(plain)
    measured = measure_layers(work, [layer.path for layer in layers])
    assert [(m.path, m.kept_bytes, m.stored_bytes) for m in measured] == [
        (layer.path, layer.kept_bytes, layer.stored_bytes) for layer in layers
    ]
    assert all(layer.variance > 0 for layer in measured)
    assert all(parameter.grad is None for parameter in work.model.parameters())


def test_measured_variance_is_that_of_the_gradients():
    """Of a linear layer whose rows have gradients of one size, the model of the allocation is exact on average."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 16))
    signs = torch.randn(256, 16).sign()
    work = Workload(model, lambda m, b: (m(b[0]) * b[1]).sum(), (torch.randn(256, 32), signs))
    (layer,) = measure_layers(work, ["1"])
    expected = torch.autograd.grad(work.compute_loss(), model[1].weight)[0]
    option = Option("compress", ("1",), CompressConfig((2,)))
    with Compress().apply(work, [option]) as applied:
        errors = []
        for seed in range(200):
            torch.manual_seed(seed)
            (found,) = torch.autograd.grad(applied.work.compute_loss(), model[1].weight)
            errors.append((found - expected).double().square().sum())
    assert float(torch.stack(errors).mean()) == pytest.approx(layer.cost(2), rel=0.1)


class Gated(nn.Module):
    """A residual layer whose gradient is as large as its gate."""

    def __init__(self, gate):
        super().__init__()
        self.linear, self.gate = nn.Linear(64, 64), gate

    def forward(self, x):
        return x + self.gate * self.linear(x)


def test_allocated_bits_beat_uniform_ones_of_the_same_bytes():
    """Where some layers' gradients are far larger than the others', those get the bits."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Gated(gate) for gate in (3.0, 0.01, 0.01, 0.01, 0.01, 3.0)))
    work = Workload(model, lambda m, b: m(b).square().mean(), torch.randn(64, 64))
    layers = measure_layers(work, [f"{i}.linear" for i in range(1, 6)])
    budget = sum(layer.bytes(4) for layer in layers)
    chosen = Compress().option(layers, budget)
    uniform = Option("compress", tuple(layer.path for layer in layers), CompressConfig((4,) * 5))
    assert len(set(chosen.config.bits)) > 1
    expected = [g.double() for g in torch.autograd.grad(work.compute_loss(), list(model.parameters()))]

    def gradients(work):
        return torch.autograd.grad(work.compute_loss(), list(work.model.parameters()))

    def error(option):
        with Compress().apply(work, [option]) as applied:
            total = 0.0
            for seed in range(20):
                torch.manual_seed(seed)
                pairs = zip(gradients(applied.work), expected, strict=True)
                total += sum(float((a.double() - b).square().sum()) for a, b in pairs)
            return total

    assert error(chosen) < 0.5 * error(uniform)


def test_prices_are_exact_where_temporaries_are_not_at_the_peak():
    work, technique = gpt2(), Compress()
    plain = profile(work)
    for option in technique.options(plain)[1::2]:
        found = predict(work, [option], plain)
        price = technique.price(option, plain)
        assert price.fidelity is Fidelity.APPROXIMATE
        assert estimate_peak(plain.graph, [price]) == pytest.approx(found.peak_bytes, rel=0.05)
        stored = sum(i.bytes for i in price.added if not i.why.startswith("temporaries"))
        removed = sum(i.bytes for i in price.removed)
        assert found.saved_bytes == plain.saved_bytes - removed + stored


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
    price = technique.price(option, plain)
    stored = sum(i.bytes for i in price.added if not i.why.startswith("temporaries"))
    with technique.apply(work, [option]) as applied:
        gc.collect()
        before = {id(each) for each in gc.get_objects() if type(each) is nn_compress._Record}
        loss = applied.work.compute_loss()
        found = [each for each in gc.get_objects() if type(each) is nn_compress._Record and id(each) not in before]
    assert stored == sum(record._codes.unpack().nbytes for record in found) > 0
    del loss


def test_options_go_from_eight_bits_to_two_with_mixtures_between():
    technique, plain = Compress(), profile(gpt2())
    options = technique.options(plain)
    stored = [
        sum(i.bytes for i in technique.price(o, plain).added if not i.why.startswith("temporaries")) for o in options
    ]
    assert stored == sorted(stored, reverse=True)
    assert [set(option.config.bits) for option in options] == [{8}, {8, 4}, {4}, {4, 2}, {2}]
    rtols = [technique.check(option).rtol for option in options]
    assert rtols == sorted(rtols)


def test_the_peak_falls_and_comes_back():
    work, technique = gpt2(), Compress()
    plain = profile(work)
    with technique.apply(work, [technique.options(plain)[2]]):
        assert profile(work).saved_bytes < 0.55 * plain.saved_bytes  # float masks of a CPU's dropout stay
    assert profile(work).saved_bytes == plain.saved_bytes


def test_with_what_recomputes_it_is_refused():
    work = gpt2()
    options = [Option("compress", ("blocks.0",), CompressConfig((4,))), Option("sqrt", ("blocks",), SqrtConfig(((),)))]
    with pytest.raises(PlanError, match="cannot be in one plan"):
        apply_options(work, options)


def test_bits_that_do_not_fit_the_sites_are_refused():
    with pytest.raises(PlanError, match="bits"):
        Option("compress", ("blocks.0",), CompressConfig((4, 4)))
    with pytest.raises(PlanError, match="bits"):
        CompressConfig((3,))
    with pytest.raises(PlanError, match="group"):
        CompressConfig((4,), group=0)


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
    assert train(8) == pytest.approx(plain, abs=0.02)


def test_a_compiled_model_is_right():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    work = Workload(model, lambda m, b: m(b).square().mean(), torch.randn(64, 64))
    expected = torch.autograd.grad(work.compute_loss(), list(model.parameters()))
    option = Option("compress", ("1", "2"), CompressConfig((8, 8)))
    with Compress().apply(work, [option]) as applied:
        compiled = torch.compile(model, backend="aot_eager")
        loss = replace(applied.work, model=compiled).compute_loss()
        found = torch.autograd.grad(loss, list(model.parameters()))
    for a, b in zip(found, expected, strict=True):
        assert float((a - b).norm() / b.norm()) < 0.02


def test_measuring_a_step_that_fails_leaves_no_hooks_and_loses_no_gradients() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(32, 8))  # which do not fit each other
    work = Workload(model, lambda model, x: model(x).sum(), torch.randn(16, 64))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        measure_layers(work, ["", "0", "2"])
    assert all(parameter.grad is not None for parameter in model.parameters())
    seen = torch.randn(64, 64, requires_grad=True).exp()
    assert torch.equal(seen.grad_fn._saved_result, seen)  # no hook stands before it
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
