"""One node for batch norm and activation: torch's values and gradients for any layout, shape and dtype."""

import copy

import pytest
import torch
from torch import nn

from lowtide import LowtideError
from lowtide.nn import keep_one_buffer
from tests.nn.plain import (
    ACTIVATIONS,
    CHECKPOINTS,
    IN_PLACE,
    ONE_BUFFER,
    POSSIBLE,
    assert_same,
    assert_same_statistics,
    ordered,
    pair,
    step,
)
from tests.nn.raising import raises
from tests.soak import each_value, in_soak

SIXTEEN_BITS = [torch.bfloat16, *in_soak([torch.float16])]


# -- gradients -----------------------------------------------------------------------------------------


SHAPES = {"NC": (4, 2), "NCL": (2, 2, 3), "NCHW": (2, 2, 1, 2), "NCDHW": (2, 2, 1, 2, 1)}
CHECKED = [
    *((strategy, name, "NCHW", training) for strategy, name in POSSIBLE for training in (True, False)),
    *((strategy, "elu", layout, True) for strategy in ONE_BUFFER for layout in SHAPES),
]


def dims_of(shape):
    return max(len(shape) - 2, 1)


@pytest.mark.parametrize(("strategy", "activation", "layout", "training"), CHECKED)
def test_gradients_are_those_of_finite_differences(strategy, activation, layout, training):
    layer, _ = pair(strategy, activation, dims=dims_of(SHAPES[layout]), channels=2)
    layer.double().train(training)
    x = torch.randn(SHAPES[layout], dtype=torch.float64, requires_grad=True)
    # gradcheck writes into the parameters that it is given, so the layer sees every change
    assert torch.autograd.gradcheck(lambda x, *parameters: layer(x), (x, *layer.parameters()))


@pytest.mark.parametrize(("activation", "training"), each_value(ACTIVATIONS, (True, False)))
def test_gradients_of_gradients_are_those_of_finite_differences(activation, training):
    layer, _ = pair("checkpoint", activation, channels=2)
    layer.double().train(training)
    x = torch.randn(2, 2, 1, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x, *parameters: layer(x), (x, *layer.parameters()))


def test_gradients_of_gradients_of_a_model_that_shares_a_layer_and_has_a_join_are_torchs():
    layer, plain = pair("checkpoint", "silu")

    def run(model):
        torch.manual_seed(1)
        h = torch.randn(3, 4, 2, 2, dtype=torch.float64, requires_grad=True)
        inner = model(h * h)
        out = model(inner * h, inner)  # x depends on the residual, and both on the same parameters
        first = torch.autograd.grad(out.square().sum(), [h, *ordered(model)], create_graph=True)
        return [*first, *torch.autograd.grad(sum(g.square().sum() for g in first), [h, *ordered(model)])]

    assert_same(run, layer.double(), plain.double())


@pytest.mark.parametrize("strategy", ["checkpoint_xhat", *IN_PLACE])
def test_gradients_of_gradients_that_cannot_be_had_are_an_error_that_names_the_alternative(strategy):
    layer, _ = pair(strategy)
    x = torch.randn(3, 4, 2, 2, requires_grad=True)
    with raises(LowtideError, "BatchNormAct2d(4", "strategy='checkpoint'"):
        torch.autograd.grad(layer(x).sum(), x, create_graph=True)


# -- layouts, shapes and dtypes ------------------------------------------------------------------------
SHAPE = (6, 4, 5, 3)


@pytest.mark.parametrize(("strategy", "activation", "dims"), [(*one, d) for one, d in each_value(POSSIBLE, (2, 3))])
def test_channels_last_stays_channels_last(strategy, activation, dims):
    layer, _ = pair(strategy, activation, dims=dims)
    layout = torch.channels_last if dims == 2 else torch.channels_last_3d
    x = torch.randn(3, 4, *(5,) * dims).contiguous(memory_format=layout).requires_grad_()
    z = layer(x)
    assert z.is_contiguous(memory_format=layout)
    z.backward(torch.randn_like(z))
    assert x.grad.is_contiguous(memory_format=layout)


@pytest.mark.parametrize(("strategy", "activation"), POSSIBLE)
def test_an_expanded_gradient_gives_torchs_gradients(strategy, activation):
    x = torch.randn(SHAPE)

    def run(model):
        leaf = x.clone().requires_grad_()
        model(leaf).mul(torch.arange(4.0).view(4, 1, 1)).sum((1, 2, 3)).sum().backward()
        return [leaf.grad, *(p.grad for p in model.parameters())]

    # dx is 0 but for the rounding of sums of 90
    assert_same(run, *pair(strategy, activation), atol=1e-5, rtol=1.3e-6)


@pytest.mark.parametrize("strategy", ONE_BUFFER)
def test_a_wrong_number_of_channels_is_an_error(strategy):
    layer, plain = pair(strategy)
    for model in (layer, plain):
        with pytest.raises(RuntimeError):
            model(torch.randn(2, 5, 3, 3, requires_grad=True))


@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
@pytest.mark.parametrize(("strategy", "activation"), POSSIBLE)
def test_under_autocast_a_model_has_torchs_dtypes_and_values(strategy, activation, dtype):
    layer, plain = pair(strategy, activation)
    torch.manual_seed(1)
    first, last, x = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1), torch.randn(SHAPE)
    convolutions = nn.ModuleList([first, last])

    def run(middle):
        convolutions.zero_grad()
        with keep_one_buffer(), torch.autocast("cpu", dtype):
            z = middle(first(x))
            out = last(z)
        out.float().square().sum().backward()
        return (z.dtype, out.dtype), (out, [p.grad for p in convolutions.parameters()])

    (dtypes, values), (expected_dtypes, expected) = run(layer), run(plain)
    assert dtypes == expected_dtypes
    if strategy == "checkpoint":
        torch.testing.assert_close(values, expected)
    assert_same_statistics(layer, plain.norm)


# -- errors against float64, at most 1.5 times those of torch ------------------------------------------


NAMES = ("z", "dx", "dγ", "dβ", "dslopes")
WIDE = (6, 64, 5, 5)
FACTOR = 1.5
ERRING = [(strategy, name) for strategy, name in POSSIBLE if strategy != "standard"]


# At a jump of φ', rounding decides on which side y falls, and one value on the other side outweighs all other errors.
# So no gradient flows into values that are nearer to a jump than this.
JUMPS = (-3.0, 0.0, 3.0)
NEAR = 0.03


def errors(strategy, activation, dtype, *, mean=0.0, scale=1.0, training=True, whole=False, **options):
    """For each tensor of a step: the norm of our error and of torch's, over three seeds, and that of the truth."""
    ours, theirs, truth = torch.zeros(3, len(NAMES), dtype=torch.float64)
    for seed in range(3):
        layer, plain = pair(strategy, activation, channels=WIDE[1], seed=seed, **options)
        if plain.norm.affine:
            for norm in (layer, plain.norm):
                norm.weight.data.abs_().mul_(scale)
        x, gradient = torch.randn(2, *WIDE)
        if not training and options.get("track_running_stats", True):
            x = x * layer.running_var.sqrt()[:, None, None] + layer.running_mean[:, None, None]
        x = (x + mean).to(dtype)
        for model in (layer, plain) if whole else (getattr(layer, "activation", None), plain.activation):
            if model is not None:
                model.to(dtype)
        layer.train(training)
        plain.train(training)
        exact = copy.deepcopy(plain).double()
        y = copy.deepcopy(exact.norm)(x.double())
        smooth = torch.stack([(y - jump).abs() > NEAR for jump in JUMPS]).all(dim=0)
        gradient = (gradient * smooth).to(dtype)
        steps = zip(
            step(layer, x, gradient),
            step(plain, x, gradient),
            step(exact, x.double(), gradient.double()),
            strict=True,
        )
        for i, (mine, torchs, expected) in enumerate(steps):
            assert mine.dtype is torchs.dtype
            ours[i] += (mine.double() - expected).square().sum()
            theirs[i] += (torchs.double() - expected).square().sum()
            truth[i] += expected.square().sum()
    count = i + 1
    return {n: (a.item(), b.item(), c.item()) for n, a, b, c in
            zip(NAMES[:count], ours.sqrt(), theirs.sqrt(), truth.sqrt(), strict=False)}  # fmt: skip


def assert_errs_no_more(norms, names=NAMES):
    factors = {name: ours / theirs for name, (ours, theirs, _) in norms.items() if name in names and ours > 0}
    assert max(factors.values()) <= FACTOR, factors


@pytest.mark.parametrize(
    ("strategy", "activation", "case"),
    [(*one, case) for one, case in each_value(ERRING, ("plain", "mean of 1e4", "frozen"))],
)
def test_float32_errs_no_more_than_torch(strategy, activation, case):
    mean = 1e4 if case == "mean of 1e4" else 0.0
    assert_errs_no_more(errors(strategy, activation, torch.float32, mean=mean, training=case != "frozen"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("activation", "whole", "training"), each_value(ACTIVATIONS, (False, True), (True, False)))
def test_16_bits_with_x_kept_err_no_more_than_torch(dtype, activation, whole, training):
    assert_errs_no_more(errors("checkpoint", activation, dtype, whole=whole, training=training))


@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
@pytest.mark.parametrize(("strategy", "activation"), [(s, a) for s, a in ERRING if s != "checkpoint"])
@pytest.mark.parametrize("training", [True, False], ids=["training", "frozen"])
def test_16_bits_with_x_not_kept_err_no_more_than_torch_but_in_sums_over_xhat(dtype, strategy, activation, training):
    """Allow for x̂ in 16 bits. torch keeps x, and sums dy·x̂ in float32, so its dγ is more exact."""
    norms = errors(strategy, activation, dtype, training=training)
    assert_errs_no_more(norms, ("z", "dx"))
    for name in norms.keys() - {"z", "dx"}:
        ours, theirs, truth = norms[name]
        assert ours <= max(FACTOR * theirs, torch.finfo(dtype).eps * truth), (name, ours / truth, theirs / truth)


@pytest.mark.parametrize("dtype", [torch.float32, *SIXTEEN_BITS])
@pytest.mark.parametrize("strategy", ["inplace", *in_soak((*CHECKPOINTS, "inplace2"))])
@pytest.mark.parametrize("activation", ["elu", "celu", "tanh", "sigmoid", "softplus"])
@pytest.mark.parametrize("scale", [40.0, *in_soak([8.0])])
def test_a_saturated_activation_errs_no_more_than_torch(dtype, strategy, activation, scale):
    assert_errs_no_more(errors(strategy, activation, dtype, scale=scale), ("z", "dx"))


@pytest.mark.parametrize("dtype", [torch.float32, *SIXTEEN_BITS])
@pytest.mark.parametrize(
    "options",
    [{"track_running_stats": False}, {"affine": False}, {"affine": False, "track_running_stats": False}],
    ids=str,
)
def test_without_parameters_or_statistics_a_step_errs_no_more_than_torch(dtype, options):
    assert_errs_no_more(errors("checkpoint", "silu", dtype, mean=3.0, **options))
