"""The error against float64 is at most 1.5 times that of torch's own step in the same dtype."""

import copy

import pytest
import torch

from tests.nn.plain import ACTIVATIONS, CHECKPOINTS, IN_PLACE, INVERTIBLE, LAYERS, pair, step

NAMES = ("z", "dx", "dγ", "dβ", "dslopes")
SHAPE = (6, 64, 5, 5)
FACTOR = 1.5
FOUR = [(s, a) for s in (*CHECKPOINTS, *IN_PLACE) for a in ACTIVATIONS if s not in IN_PLACE or a in INVERTIBLE]
SIXTEEN_BITS = [torch.bfloat16, torch.float16]

# Where φ' jumps, the side on which y falls is a matter of its rounding, and one value that falls on the other side
# outweighs all other errors: no gradient flows into values that are nearer to a jump than this.
JUMPS = (-3.0, 0.0, 3.0)
NEAR = 0.03


def errors(strategy, activation, dtype, *, mean=0.0, scale=1.0, training=True, whole=False, **options):
    """For each tensor of a step: the norm of our error and of torch's, over three seeds, and that of the truth."""
    ours, theirs, truth = torch.zeros(3, len(NAMES), dtype=torch.float64)
    for seed in range(3):
        layer, plain = pair(strategy, activation, channels=SHAPE[1], seed=seed, **options)
        if plain.norm.affine:
            for norm in (layer, plain.norm):
                norm.weight.data.abs_().mul_(scale)
        x, gradient = torch.randn(2, *SHAPE)
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
        for i, (found, torchs, expected) in enumerate(steps):
            assert found.dtype is torchs.dtype
            ours[i] += (found.double() - expected).square().sum()
            theirs[i] += (torchs.double() - expected).square().sum()
            truth[i] += expected.square().sum()
    count = i + 1
    return {n: (a.item(), b.item(), c.item()) for n, a, b, c in
            zip(NAMES[:count], ours.sqrt(), theirs.sqrt(), truth.sqrt(), strict=False)}  # fmt: skip


def factors(found, names):
    return {name: ours / theirs for name, (ours, theirs, _) in found.items() if name in names and ours > 0}


@pytest.mark.parametrize(("strategy", "activation"), FOUR)
@pytest.mark.parametrize("case", ["plain", "mean of 1e4", "frozen"])
def test_float32_errs_no_more_than_torch(strategy, activation, case):
    mean = 1e4 if case == "mean of 1e4" else 0.0
    found = errors(strategy, activation, torch.float32, mean=mean, training=case != "frozen")
    assert max(factors(found, NAMES).values()) <= FACTOR, factors(found, NAMES)


@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("whole", [False, True], ids=["parameters in float32", "parameters in 16 bits"])
@pytest.mark.parametrize("training", [True, False], ids=["training", "frozen"])
def test_16_bits_with_x_kept_err_no_more_than_torch(dtype, activation, whole, training):
    found = errors("checkpoint", activation, dtype, whole=whole, training=training)
    assert max(factors(found, NAMES).values()) <= FACTOR, factors(found, NAMES)


@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
@pytest.mark.parametrize(("strategy", "activation"), [(s, a) for s, a in FOUR if s != "checkpoint"])
@pytest.mark.parametrize("training", [True, False], ids=["training", "frozen"])
def test_16_bits_with_x_not_kept_err_no_more_than_torch_but_in_sums_over_xhat(dtype, strategy, activation, training):
    """What is kept has 16 bits, and x̂ with it. torch has x, and sums dy·x̂ in float32: no such dγ can be had."""
    found = errors(strategy, activation, dtype, training=training)
    assert max(factors(found, ("z", "dx")).values()) <= FACTOR, factors(found, NAMES)
    for name in found.keys() - {"z", "dx"}:
        ours, theirs, truth = found[name]
        assert ours <= max(FACTOR * theirs, torch.finfo(dtype).eps * truth), (name, ours / truth, theirs / truth)


@pytest.mark.parametrize("dtype", [torch.float32, *SIXTEEN_BITS])
@pytest.mark.parametrize("strategy", [*CHECKPOINTS, *IN_PLACE])
@pytest.mark.parametrize("activation", ["elu", "celu", "tanh", "sigmoid", "softplus"])
@pytest.mark.parametrize("scale", [8.0, 40.0])
def test_a_saturated_activation_errs_no_more_than_torch(dtype, strategy, activation, scale):
    found = errors(strategy, activation, dtype, scale=scale)
    assert max(factors(found, ("z", "dx")).values()) <= FACTOR, factors(found, NAMES)


@pytest.mark.parametrize("dtype", [torch.float32, *SIXTEEN_BITS])
@pytest.mark.parametrize(
    "options",
    [{"track_running_stats": False}, {"affine": False}, {"affine": False, "track_running_stats": False}],
    ids=str,
)
def test_without_parameters_or_statistics_a_step_errs_no_more_than_torch(dtype, options):
    found = errors("checkpoint", "silu", dtype, mean=3.0, **options)
    assert max(factors(found, NAMES).values()) <= FACTOR, factors(found, NAMES)


def test_a_mean_of_1e4_with_a_variance_of_one_does_not_lose_the_variance():
    layer = LAYERS[2](4, "identity", "checkpoint", affine=False)
    x = torch.randn(64, 4, 8, 8, requires_grad=True)
    z = layer(x + 1e4)
    assert z.detach().var((0, 2, 3)) == pytest.approx([1.0] * 4, abs=1e-3)
