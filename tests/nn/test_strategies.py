"""Strategies: refusals, and where z does not determine x a layer keeps x."""

import pytest
import torch

from lowtide import LowtideError
from lowtide.nn import BatchNormAct1d, BatchNormAct2d
from tests.nn.plain import (
    ACTIVATIONS,
    CHECKPOINTS,
    FOLDING,
    IN_PLACE,
    INVERTIBLE,
    ONE_BUFFER,
    assert_same_step,
    pair,
)


@pytest.mark.parametrize("activation", FOLDING)
@pytest.mark.parametrize("strategy", IN_PLACE)
def test_an_activation_without_inverse_in_place_is_an_error_that_names_the_alternative(strategy, activation):
    with pytest.raises(LowtideError, match=r"no inverse.*strategy='checkpoint'"):
        BatchNormAct2d(4, ACTIVATIONS[activation](), strategy)


def test_an_unknown_strategy_is_an_error_that_names_those_there_are():
    with pytest.raises(LowtideError, match=r"'in_place'.*BatchNormAct1d.*checkpoint_xhat, inplace"):
        BatchNormAct1d(4, "relu", "in_place")


SHAPE = (6, 4, 5, 3)


EVERY = [(s, a) for s in (*CHECKPOINTS, *IN_PLACE) for a in ACTIVATIONS if s not in IN_PLACE or a in INVERTIBLE]


def set_affine(layer, plain, weight, bias):
    for norm in (layer, plain.norm):
        with torch.no_grad():
            norm.weight.copy_(torch.as_tensor(weight))
            norm.bias.copy_(torch.as_tensor(bias))


@pytest.mark.parametrize(("strategy", "activation"), EVERY)
@pytest.mark.parametrize(
    ("weight", "bias"),
    [
        ([1.0, 0.0, 1.0, 1.0], [0.5, 0.5, 0.0, -0.5]),
        ([0.0] * 4, [0.5, 0.0, -0.5, 2.0]),
        ([0.0] * 4, [0.0] * 4),
        ([-1.0, -0.3, -2.0, 1.0], [0.5, 0.0, -0.5, 0.1]),
        ([1e-4, -1e-4, 1.0, 1.0], [1.0, 1.0, -3.0, 3.0]),
        ([1e-12, 1.0, -1e-30, 1.0], [1.0, 1e6, -1.0, -1e6]),
    ],
    ids=["one γ is 0", "γ is 0", "γ and β are 0", "γ < 0", "large β/γ", "huge β/γ"],
)
def test_any_parameters_give_torchs_step_in_training_and_when_frozen(strategy, activation, weight, bias):
    layer, plain = pair(strategy, activation)
    set_affine(layer, plain, weight, bias)
    x, gradient = torch.randn(2, *SHAPE)
    for training in (True, False):
        for model in (layer, plain):
            model.train(training)
            model.zero_grad()
        assert_same_step(layer, plain, x, gradient)


@pytest.mark.parametrize("strategy", ONE_BUFFER)
@pytest.mark.parametrize("activation", ["elu", "celu", "tanh", "sigmoid", "softplus"])
@pytest.mark.parametrize("weight", [8.0, 40.0])
def test_a_saturated_activation_gives_torchs_step(strategy, activation, weight):
    """With γ = 40, z tells nothing of most y: exp(-40) is far below what can be told from 1."""
    layer, plain = pair(strategy, activation)
    set_affine(layer, plain, [weight] * 4, [-2.0, 0.0, 2.0, 4.0])
    x, gradient = torch.randn(2, *SHAPE)
    assert_same_step(layer, plain, x, gradient)
