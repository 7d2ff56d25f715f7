"""Activations are read from names and modules as torch means them, and undone where they can be."""

import copy

import pytest
import torch
from torch import nn

from lowtide import LowtideError
from lowtide.kernels.activations import FUSED, POINTWISE, Activation, read_module
from lowtide.nn import BatchNormAct2d
from tests.nn.plain import ACTIVATIONS, FOLDING, INVERTIBLE, Plain, assert_same_step

WITH_NUMBERS = [
    *(nn.LeakyReLU(0.3), nn.LeakyReLU(1.5), nn.ELU(0.4), nn.ELU(2.0), nn.CELU(0.3), nn.CELU(3.0)),
    *(nn.GELU("tanh"), nn.Softplus(2.0, 5.0), nn.Softplus(0.5, 20.0), nn.PReLU(4), nn.PReLU(init=-0.5)),
]
OVERWRITING = (nn.ReLU, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SiLU, nn.Hardswish, nn.ReLU6, nn.Mish, nn.SELU, nn.Hardtanh)
IN_PLACE_MODULES = [kind(inplace=True) for kind in OVERWRITING]
UNKNOWN = [nn.Mish(), nn.ReLU6(), nn.SELU(), nn.Hardtanh(), nn.Hardsigmoid(), nn.Softsign(), nn.LogSigmoid()]
SHAPE = (6, 4, 5, 5)


def values(dtype=torch.float64):
    return torch.cat([torch.linspace(-30, 30, 2001), torch.tensor([-0.0, 0.0, 1e-30, -1e-30])]).to(dtype)


@pytest.mark.parametrize("name", POINTWISE)
def test_a_row_of_the_table_is_torchs_module(name):
    row = POINTWISE[name]
    module = row.module(0.0, 0.0) if name == "threshold" else row.module()
    x = torch.linspace(-30.0, 30.0, 101)
    assert name == "identity" or read_module(module) == Activation(name, row.defaults)
    assert torch.equal(row.function(x, *row.defaults), module(x))
    if row.in_place is not None:
        written = x.clone()
        assert row.in_place(written, *row.defaults) is written
        assert torch.equal(written, module(x))


@pytest.mark.parametrize("name", [*FUSED, "prelu"])
def test_a_name_is_torchs_module(name):
    act, module = Activation.of(name), nn.PReLU() if name == "prelu" else POINTWISE[name].module()
    assert torch.equal(act(values(torch.float32)), module(values(torch.float32)))
    assert torch.equal(act.write(values(torch.float32)), module(values(torch.float32)))
    assert (act.name, act.numbers) == (name, Activation.of(module).numbers)


NUMBERS = [
    *((module, "checkpoint") for module in (*WITH_NUMBERS, *IN_PLACE_MODULES, *UNKNOWN)),
    *((module, "inplace") for module in WITH_NUMBERS if type(module) not in (nn.GELU, nn.PReLU)),
]


@pytest.mark.parametrize(("module", "strategy"), NUMBERS, ids=repr)
def test_a_module_keeps_its_numbers(module, strategy):
    layer = BatchNormAct2d(4, copy.deepcopy(module), strategy)
    plain = Plain(nn.BatchNorm2d(4), copy.deepcopy(module))
    x, gradient = torch.randn(2, *SHAPE)
    assert_same_step(layer, plain, x, gradient)


def test_none_is_no_activation():
    x = torch.randn(3)
    assert torch.equal(Activation.of(None)(x), x)


def test_unknown_names_and_things_are_errors_that_name_what_there_is():
    for stranger, named in (("swish", "'swish'"), (torch.relu, "relu")):
        with pytest.raises(LowtideError) as refusal:
            Activation.of(stranger)
        assert named in str(refusal.value)
        assert "silu" in str(refusal.value)


@pytest.mark.parametrize("name", INVERTIBLE)
def test_invertible_ones_can_be_undone(name):
    act = Activation.of(INVERTIBLE[name]())
    assert act.invertible
    y = torch.linspace(-4, 4, 801, dtype=torch.float64)
    torch.testing.assert_close(act.inverse(INVERTIBLE[name]()(y)), y)


FOLDED = [nn.LeakyReLU(0), nn.LeakyReLU(-0.1), nn.ELU(0), nn.ELU(-1), *(module() for module in FOLDING.values())]


@pytest.mark.parametrize("module", FOLDED, ids=repr)
def test_folding_ones_cannot_be_undone(module):
    assert not Activation.of(module).invertible


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", INVERTIBLE)
def test_the_inverse_is_finite_in_order_and_gives_z_again_even_where_z_is_saturated(name, dtype):
    act = Activation.of(INVERTIBLE[name]())
    y = values(dtype)[:2001]
    z = act(y)
    back = act.inverse(z)
    assert back.isfinite().all()
    assert (back.diff() >= 0).all()
    assert back.abs().max() <= 30.5, "the last y that can be told from the end, not one far beyond it"
    torch.testing.assert_close(act(back).to(dtype), z)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_the_sides_of_a_leaky_relu_are_told_by_the_sign_bit(dtype):
    act = Activation("leaky_relu", (1e-4,))
    tiny = torch.finfo(dtype).tiny
    z = act(torch.tensor([-tiny, tiny, -0.0, 0.0], dtype=dtype))
    assert act.inverse(z).signbit().tolist() == [True, False, True, False]


@pytest.mark.parametrize("name", [n for n in ACTIVATIONS if n != "mish"])
def test_gradients_are_those_of_autograd(name):
    module = ACTIVATIONS[name]().double()
    act = Activation.of(module)
    y = torch.randn(4, 3, 5, dtype=torch.float64, requires_grad=True)
    dz = torch.randn(4, 3, 5, dtype=torch.float64)
    expected = torch.autograd.grad(module(y), [y, *module.parameters()], dz)
    dy, dslopes = act.backward(dz, y.detach(), *module.parameters())
    actual = [dy] if dslopes is None else [dy, dslopes]
    torch.testing.assert_close(actual, list(expected))


class Noise(nn.Module):
    """An activation that draws random numbers in training, as RReLU does."""

    def forward(self, y):
        return y * (torch.rand_like(y) if self.training else 0.5)


@pytest.mark.parametrize("module", [Noise(), nn.RReLU(), nn.Dropout(0.5)], ids=repr)
@pytest.mark.parametrize("training", [True, False])
def test_an_activation_that_draws_random_numbers_draws_the_same_again(module, training):
    layer = BatchNormAct2d(4, module, "checkpoint").train(training)
    plain = Plain(nn.BatchNorm2d(4), copy.deepcopy(module)).train(training)
    conv = nn.Conv2d(4, 4, 1)
    x, actual = torch.randn(SHAPE), []
    for norm in (layer, plain):
        torch.manual_seed(1)
        conv.zero_grad()
        leaf = x.clone().requires_grad_()
        nn.Sequential(norm, conv)(leaf).square().sum().backward()
        actual.append([leaf.grad, conv.weight.grad.clone(), torch.rand(1)])
    torch.testing.assert_close(*actual)


class Learned(nn.Module):
    """A pointwise module of the user's with parameters and a buffer."""

    def __init__(self):
        super().__init__()
        self.slope, self.unused = nn.Parameter(torch.tensor(0.3)), nn.Parameter(torch.zeros(2))
        self.register_buffer("shift", torch.tensor(0.1))

    def forward(self, y):
        return torch.where(y > self.shift, y, self.slope * y)


@pytest.mark.parametrize("strategy", ["checkpoint", "checkpoint_xhat"])
@pytest.mark.parametrize("frozen", [False, True])
def test_what_a_module_of_the_users_learns_gets_its_gradients(strategy, frozen):
    module = Learned()
    module.slope.requires_grad_(not frozen)
    layer = BatchNormAct2d(4, module, strategy)
    assert "activation.slope" in layer.state_dict()
    plain = Plain(nn.BatchNorm2d(4), copy.deepcopy(module))
    x, gradient = torch.randn(2, *SHAPE)
    assert_same_step(layer, plain, x, gradient)
    assert module.unused.grad is None
    if frozen:
        assert module.slope.grad is None
    else:
        torch.testing.assert_close(module.slope.grad, plain.activation.slope.grad)
