"""Strategies: refusals, and where z does not determine x a layer keeps x."""

import pytest
import torch

from lowtide import LowtideError
from lowtide.kernels.activations import Activation
from lowtide.nn import BatchNormAct1d, BatchNormAct2d
from lowtide.nn.strategies import InverseGuard, resolve
from tests.nn.plain import ACTIVATIONS, FOLDING, IN_PLACE, INVERTIBLE, POSSIBLE, assert_same_step, pair
from tests.nn.raising import raises
from tests.soak import each_value

AFFINE = {
    "one γ is 0": ([1.0, 0.0, 1.0, 1.0], [0.5, 0.5, 0.0, -0.5]),
    "γ is 0": ([0.0] * 4, [0.5, 0.0, -0.5, 2.0]),
    "γ and β are 0": ([0.0] * 4, [0.0] * 4),
    "γ < 0": ([-1.0, -0.3, -2.0, 1.0], [0.5, 0.0, -0.5, 0.1]),
    "large β/γ": ([1e-4, -1e-4, 1.0, 1.0], [1.0, 1.0, -3.0, 3.0]),
    "huge β/γ": ([1e-12, 1.0, -1e-30, 1.0], [1.0, 1e6, -1.0, -1e6]),
}


def test_auto_keeps_x_on_a_cpu_and_for_joins():
    assert resolve("auto", Activation.of("leaky_relu"), torch.ones(1)) == "checkpoint"
    assert resolve("auto", Activation.of("leaky_relu"), torch.ones(1), joined=True) == "checkpoint"


@pytest.mark.parametrize("activation", FOLDING)
@pytest.mark.parametrize("strategy", IN_PLACE)
def test_an_activation_without_inverse_in_place_is_an_error_that_names_the_alternative(strategy, activation):
    with raises(LowtideError, "strategy='checkpoint'"):
        BatchNormAct2d(4, ACTIVATIONS[activation](), strategy)


def test_an_unknown_strategy_is_an_error_that_names_the_layer_and_the_known_ones():
    with raises(LowtideError, "'in_place'", "BatchNormAct1d", "checkpoint_xhat", "inplace2"):
        BatchNormAct1d(4, "relu", "in_place")


def set_affine(weight, bias, *norms):
    for norm in norms:
        with torch.no_grad():
            norm.weight.copy_(torch.as_tensor(weight))
            norm.bias.copy_(torch.as_tensor(bias))


# What an in-place strategy can invert depends on the activation and the parameters.
@pytest.mark.parametrize(
    ("strategy", "activation", "affine"),
    [
        *((*one, affine) for one, affine in each_value([p for p in POSSIBLE if p[0] != "inplace"], AFFINE)),
        *(("inplace", activation, affine) for activation in INVERTIBLE for affine in AFFINE),
    ],
)
def test_any_parameters_give_torchs_step_in_training_and_when_frozen(strategy, activation, affine):
    layer, plain = pair(strategy, activation)
    set_affine(*AFFINE[affine], layer, plain.norm)
    x, gradient = torch.randn(2, 6, 4, 5, 3)
    for training in (True, False):
        for model in (layer, plain):
            model.train(training)
            model.zero_grad()
        assert_same_step(layer, plain, x, gradient)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_guard_sees_parameters_that_are_replaced_or_loaded(device):
    """On a GPU the answer is remembered for some steps; other parameters and loaded ones are asked about at once."""
    guard, act, x = InverseGuard(), Activation.of("leaky_relu"), torch.ones(2, 4, device=device)
    weight, bias = torch.ones(4, device=device), torch.zeros(4, device=device)
    assert guard.is_safe(x, weight, bias, act)
    assert not guard.is_safe(x, torch.zeros(4, device=device), bias, act)
    assert guard.is_safe(x, weight, bias, act)
    weight.zero_()
    guard.forget()
    assert not guard.is_safe(x, weight, bias, act)
