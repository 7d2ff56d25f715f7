"""Bits for each layer under a budget, from measured variances."""

import itertools

import pytest
import torch
from torch import nn

from lowtide import Workload, profile
from lowtide.errors import LowtideError
from lowtide.sizes import format_size
from lowtide.techniques.compress import Compress, LayerCosts, allocate_bits, measure_layers
from lowtide.techniques.compress.technique import CompressConfig
from lowtide.techniques.technique import Option
from tests.models import Call, squares
from tests.soak import count
from tests.techniques.compress.steps import gpt2

CHOICES = (2, 4, 8, 0)


def random_layers(seed: int, number: int = 5) -> list[LayerCosts]:
    draw = torch.Generator().manual_seed(seed)
    layers = []
    for i in range(number):
        groups = int(torch.randint(1, 40, (), generator=draw))
        variance = float(10 ** (4 * torch.rand((), generator=draw)))
        layers.append(LayerCosts(f"{i}", groups * 1024, (groups * 72, groups * 136, groups * 264), variance))
    return layers


def test_bits_are_those_that_trying_all_finds():
    for seed in range(count(10, soak=30)):
        layers = random_layers(seed)
        least = sum(layer.bytes(2) for layer in layers)
        most = sum(layer.kept_bytes for layer in layers)
        for share in (0.0, 0.05, 0.2, 0.5, 0.9, 1.0):
            budget = int(least + share * (most - least))
            actual = allocate_bits(layers, budget)
            costs = {
                bits: sum(layer.cost(b) for layer, b in zip(layers, bits, strict=True))
                for bits in itertools.product(CHOICES, repeat=len(layers))
                if sum(layer.bytes(b) for layer, b in zip(layers, bits, strict=True)) <= budget
            }
            assert actual in costs
            assert costs[actual] == pytest.approx(min(costs.values()), rel=1e-12)


def test_a_budget_below_two_bits_is_refused_and_many_layers_are_no_matter():
    layers = random_layers(0)
    least = sum(layer.bytes(2) for layer in layers)
    with pytest.raises(LowtideError) as error:
        allocate_bits(layers, least - 1)
    assert format_size(least) in str(error.value)
    many = random_layers(1, 200)
    budget = sum(layer.bytes(4) for layer in many)
    bits = allocate_bits(many, budget)
    assert sum(layer.bytes(b) for layer, b in zip(many, bits, strict=True)) <= budget
    assert sum(layer.cost(b) for layer, b in zip(many, bits, strict=True)) < 0.5 * sum(layer.cost(4) for layer in many)


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
    """The allocation's model is exact on average for a linear layer whose rows have gradients of one size."""
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
            (actual,) = torch.autograd.grad(applied.work.compute_loss(), model[1].weight)
            errors.append((actual - expected).double().square().sum())
    assert float(torch.stack(errors).mean()) == pytest.approx(layer.cost(2), rel=0.1)


def gated(gate):
    """A residual layer whose gradient is as large as its gate."""
    return Call(lambda m, x: x + gate * m.linear(x), linear=nn.Linear(64, 64))


def test_layers_with_the_largest_gradients_get_the_bits_which_beats_uniform_ones_of_the_same_bytes():
    torch.manual_seed(0)
    model = nn.Sequential(*(gated(gate) for gate in (3.0, 0.01, 0.01, 0.01, 0.01, 3.0)))
    work = Workload(model, squares, torch.randn(64, 64))
    layers = measure_layers(work, [f"{i}.linear" for i in range(1, 6)])
    budget = sum(layer.bytes(4) for layer in layers)
    chosen = Compress().option(layers, budget)
    bits = dict(zip(chosen.site, chosen.config.bits, strict=True))
    assert bits.get("5.linear", 16) > max(bits[f"{i}.linear"] for i in range(1, 5))
    assert sum(layer.bytes(bits.get(layer.path, 0)) for layer in layers) <= budget
    uniform = Option("compress", tuple(layer.path for layer in layers), CompressConfig((4,) * 5))
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


def test_measuring_a_step_that_fails_leaves_no_hooks_and_loses_no_gradients() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(32, 8))  # which do not fit each other
    work = Workload(model, lambda model, x: model(x).sum(), torch.randn(16, 64))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(RuntimeError) as error:
        measure_layers(work, ["", "0", "2"])
    assert "32x8" in str(error.value)
    assert all(parameter.grad is not None for parameter in model.parameters())
    seen = torch.randn(64, 64, requires_grad=True).exp()
    assert torch.equal(seen.grad_fn._saved_result, seen)  # no hook stands before it
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
