"""BatchNormAct is batch norm and its activation: the same values, gradients and statistics under every strategy."""

import copy

import pytest
import torch
from torch import nn

from lowtide import LowtideError
from lowtide.nn import BatchNormAct1d, BatchNormAct2d, batch_norm_act
from tests.nn.plain import (
    ACTIVATIONS,
    FOLDING,
    IN_PLACE,
    LAYERS,
    NORMS,
    ONE_BUFFER,
    POSSIBLE,
    Plain,
    assert_same_statistics,
    assert_same_step,
    ordered,
    pair,
    step,
)

SHAPES = {"NC": (4, 2), "NCL": (2, 2, 3), "NCHW": (2, 2, 1, 2), "NCDHW": (2, 2, 1, 2, 1)}


def dims_of(shape):
    return max(len(shape) - 2, 1)


# -- gradients -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", SHAPES)
@pytest.mark.parametrize(("strategy", "activation"), POSSIBLE)
def test_gradients_are_those_of_finite_differences(strategy, activation, layout):
    layer, _ = pair(strategy, activation, dims=dims_of(SHAPES[layout]), channels=2)
    layer.double()
    x = torch.randn(SHAPES[layout], dtype=torch.float64, requires_grad=True)
    # gradcheck writes into the parameters that it is given, so the layer sees every change
    assert torch.autograd.gradcheck(lambda x, *parameters: layer(x), (x, *layer.parameters()))


@pytest.mark.parametrize(("strategy", "activation"), POSSIBLE)
def test_gradients_in_eval_mode_are_those_of_finite_differences(strategy, activation):
    layer, _ = pair(strategy, activation, channels=2)
    layer.double().eval()
    x = torch.randn(2, 2, 1, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, *parameters: layer(x), (x, *layer.parameters()))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("training", [True, False])
def test_gradients_of_gradients_are_those_of_finite_differences(activation, training):
    layer, _ = pair("checkpoint", activation, channels=2)
    layer.double().train(training)
    x = torch.randn(2, 2, 1, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x, *parameters: layer(x), (x, *layer.parameters()))


def test_gradients_of_gradients_of_a_model_that_shares_a_layer_and_has_a_join_are_torchs():
    layer, plain = pair("checkpoint", "silu")
    found, expected = [], []
    for model, results in ((layer.double(), found), (plain.double(), expected)):
        torch.manual_seed(1)
        h = torch.randn(3, 4, 2, 2, dtype=torch.float64, requires_grad=True)
        inner = model(h * h)
        out = model(inner * h, inner)  # x depends on the residual, and both on the same parameters
        first = torch.autograd.grad(out.square().sum(), [h, *ordered(model)], create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), [h, *ordered(model)])
        results += [*first, *second]
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("strategy", ["checkpoint_xhat", *IN_PLACE])
def test_gradients_of_gradients_that_cannot_be_had_are_an_error_that_names_the_alternative(strategy):
    layer, _ = pair(strategy)
    x = torch.randn(3, 4, 2, 2, requires_grad=True)
    with pytest.raises(LowtideError, match=r"BatchNormAct2d\(4.*strategy='checkpoint'"):
        torch.autograd.grad(layer(x).sum(), x, create_graph=True)


@pytest.mark.parametrize("activation", FOLDING)
@pytest.mark.parametrize("strategy", IN_PLACE)
def test_an_activation_without_inverse_in_place_is_an_error_that_names_the_alternative(strategy, activation):
    with pytest.raises(LowtideError, match=r"no inverse.*strategy='checkpoint'"):
        BatchNormAct2d(4, ACTIVATIONS[activation](), strategy)


def test_an_unknown_strategy_is_an_error_that_names_those_there_are():
    with pytest.raises(LowtideError, match=r"'in_place'.*BatchNormAct1d.*checkpoint_xhat, inplace"):
        BatchNormAct1d(4, "relu", "in_place")


# -- values --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["NC", "NCHW"])
@pytest.mark.parametrize(("strategy", "activation"), POSSIBLE)
def test_a_step_is_torchs(strategy, activation, layout):
    shape = (6, 4, *(3,) * (len(SHAPES[layout]) - 2))
    layer, plain = pair(strategy, activation, dims=dims_of(shape))
    x, gradient = torch.randn(2, *shape)
    assert_same_step(layer, plain, x, gradient)


@pytest.mark.parametrize("strategy", ONE_BUFFER)
@pytest.mark.parametrize(
    "options",
    [
        {"affine": False},
        {"momentum": None},
        {"momentum": 0.3, "eps": 0.1},
        {"track_running_stats": False},
        {"affine": False, "track_running_stats": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("training", [True, False])
def test_options_are_torchs(strategy, options, training):
    layer, plain = pair(strategy, **options)
    layer.train(training)
    plain.train(training)
    x, gradient = torch.randn(2, 5, 4, 3, 3)
    assert_same_step(layer, plain, x, gradient)


@pytest.mark.parametrize("strategy", ONE_BUFFER)
@pytest.mark.parametrize("momentum", [0.1, 0.25, None])
def test_statistics_after_twenty_steps_are_torchs_bit_for_bit(strategy, momentum):
    layer, plain = pair(strategy, "leaky_relu", momentum=momentum)
    for _ in range(20):
        x = torch.randn(5, 4, 3, 3) * 3 + 2
        layer(x.requires_grad_()).sum().backward()
        plain(x.detach().requires_grad_()).sum().backward()
    for name, expected in plain.norm.named_buffers():
        assert torch.equal(getattr(layer, name), expected), name
    assert layer.num_batches_tracked == 20


@pytest.mark.parametrize("strategy", ONE_BUFFER)
def test_a_trained_model_is_torchs(strategy):
    """20 steps of a small network: what differs by rounding in one step has not grown."""
    torch.manual_seed(0)
    convs = [nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)]
    plain = nn.Sequential(
        convs[0], nn.BatchNorm2d(4), nn.LeakyReLU(), convs[1], nn.BatchNorm2d(4), nn.LeakyReLU(), nn.Flatten(),
        nn.Linear(4 * 4 * 4, 5),
    )  # fmt: skip
    copied = copy.deepcopy(plain)
    ours = nn.Sequential(
        copied[0], BatchNormAct2d(4, "leaky_relu", strategy), copied[3], BatchNormAct2d(4, "leaky_relu", strategy),
        *copied[6:],
    )  # fmt: skip
    for model in (plain.double(), ours.double()):
        torch.manual_seed(1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(20):
            x, target = torch.randn(8, 3, 8, 8, dtype=torch.float64), torch.randint(5, (8,))
            nn.functional.cross_entropy(model(x), target).backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(list(ours.parameters()), list(plain.parameters()))
    torch.testing.assert_close(list(ours.buffers()), list(plain.buffers()))


@pytest.mark.parametrize("strategy", ONE_BUFFER)
def test_a_frozen_layer_in_a_training_model_is_torchs(strategy):
    layer, plain = pair(strategy)
    found, expected = nn.Sequential(nn.Conv2d(4, 4, 1), layer), nn.Sequential(nn.Conv2d(4, 4, 1), plain)
    expected[0].load_state_dict(found[0].state_dict())
    before = copy.deepcopy(layer.state_dict())
    x = torch.randn(5, 4, 3, 3)
    for model, norm in ((found, layer), (expected, plain.norm)):
        model.train()
        norm.eval()
        model(x).square().sum().backward()
    torch.testing.assert_close([p.grad for p in found.parameters()], [p.grad for p in expected.parameters()])
    torch.testing.assert_close(layer.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize("strategy", ONE_BUFFER)
@pytest.mark.parametrize("frozen", [("weight",), ("bias",), ("weight", "bias")], ids=" ".join)
def test_frozen_parameters_get_no_gradient_and_the_others_torchs(strategy, frozen):
    layer, plain = pair(strategy)
    for name in frozen:
        getattr(layer, name).requires_grad_(False)
        getattr(plain.norm, name).requires_grad_(False)
    x, gradient = torch.randn(2, 5, 4, 3, 3)
    assert_same_step(layer, plain, x, gradient)


@pytest.mark.parametrize("strategy", ONE_BUFFER)
def test_a_frozen_stem_before_what_is_trained_is_torchs(strategy):
    """No input of the layer needs a gradient, and yet a later layer keeps z."""
    layer, plain = pair(strategy)
    head = nn.Conv2d(4, 2, 1)
    x = torch.randn(5, 4, 3, 3)
    gradients = []
    for stem in (layer, plain):
        head.zero_grad()
        nn.Sequential(stem.requires_grad_(False), head)(x).square().sum().backward()
        gradients.append(head.weight.grad)
    torch.testing.assert_close(*gradients)
    assert_same_statistics(layer, plain.norm)


@pytest.mark.parametrize("activation", ["relu", "prelu"])
def test_the_functional_form_is_torchs(activation):
    _, plain = pair("checkpoint", activation)
    x, gradient = torch.randn(2, 5, 4, 3, 3)
    norm = copy.deepcopy(plain.norm)
    found = x.clone().requires_grad_()
    z = batch_norm_act(found, norm.weight, norm.bias, norm.running_mean, norm.running_var, activation=activation)
    z.backward(gradient)
    expected = step(plain, x, gradient)
    torch.testing.assert_close([z.detach(), found.grad, norm.weight.grad, norm.bias.grad], expected[:4])
    torch.testing.assert_close(norm.running_var, plain.norm.running_var)


@pytest.mark.parametrize("dims", LAYERS)
def test_a_layer_made_from_a_batch_norm_shares_its_parameters_and_its_mode(dims):
    norm = NORMS[dims](4, eps=0.1, momentum=0.3).eval()
    layer = LAYERS[dims].from_batch_norm(norm, nn.PReLU(), "checkpoint")
    assert layer.weight is norm.weight
    assert layer.running_mean is norm.running_mean
    assert list(layer.state_dict()) == list(norm.state_dict())
    assert not layer.training
    x, gradient = torch.randn(2, 5, 4, *(2,) * dims)
    expected = step(Plain(copy.deepcopy(norm), nn.PReLU()), x, gradient)
    torch.testing.assert_close(step(layer, x, gradient), expected[:-1])


def test_a_layer_is_not_made_from_a_batch_norm_of_other_dimensions():
    with pytest.raises(LowtideError, match="BatchNormAct2d is made from a BatchNorm2d, not from a BatchNorm1d"):
        BatchNormAct2d.from_batch_norm(nn.BatchNorm1d(4), "relu")
