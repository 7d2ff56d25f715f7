"""The function, with a residual or without: any shape, options and readers give the step of torch's own."""

import copy

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from lowtide import LowtideError
from lowtide.nn import BatchNormAct2d, batch_norm_act
from tests.nn.buffers import CHANNELS, FULL, LARGE, kept_by_allocator, kept_by_profile, mean_loss
from tests.nn.plain import (
    ACTIVATIONS,
    CHECKPOINTS,
    IN_PLACE,
    INVERTIBLE,
    LAYERS,
    NORMS,
    ONE_BUFFER,
    Plain,
    assert_same,
    assert_same_statistics,
    assert_same_step,
    pair,
    step,
)
from tests.nn.raising import raises
from tests.soak import count, in_soak
from tests.tracing.allocator import allocated_peak


@pytest.mark.parametrize("activation", ["relu", "prelu"])
@pytest.mark.parametrize("joined", [False, True])
def test_the_functional_form_is_torchs(activation, joined):
    _, plain = pair("checkpoint", activation)
    x, gradient, residual = torch.randn(3, 5, 4, 3, 3)
    norm, leaf = copy.deepcopy(plain.norm), x.clone().requires_grad_()
    z = batch_norm_act(
        leaf, norm.weight, norm.bias, norm.running_mean, norm.running_var, norm.num_batches_tracked,
        activation=activation, residual=residual if joined else None,
    )  # fmt: skip
    z.backward(gradient)
    expected = step(plain, x, gradient, *([residual] if joined else []))
    torch.testing.assert_close([z.detach(), leaf.grad], expected[:2])
    torch.testing.assert_close([norm.weight.grad, norm.bias.grad], expected[2 + joined : 4 + joined])
    assert_same_statistics(norm, plain.norm)


SMALL = (5, 4, 3, 3)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("strategy", ["checkpoint", *in_soak(("standard", "auto"))])
@pytest.mark.parametrize("training", [True, False], ids=["training", "frozen"])
def test_a_join_is_torchs(strategy, activation, training):
    layer, plain = pair(strategy, activation)
    layer.train(training)
    plain.train(training)
    x, gradient, residual = torch.randn(3, *SMALL)
    assert_same_step(layer, plain, x, gradient, residual)


@pytest.mark.parametrize("activation", ["relu", "silu", "prelu", "mish"])
def test_gradients_of_a_join_are_those_of_finite_differences(activation):
    layer, _ = pair("checkpoint", activation, channels=2)
    layer.double()
    x, residual = (torch.randn(2, 2, 1, 2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    check = (lambda x, residual, *parameters: layer(x, residual), (x, residual, *layer.parameters()))
    assert torch.autograd.gradcheck(*check)
    assert torch.autograd.gradgradcheck(*check)


@pytest.mark.parametrize("strategy", ["checkpoint_xhat", *IN_PLACE])
def test_a_join_by_a_strategy_that_cannot_is_an_error_that_names_the_alternative(strategy):
    layer, _ = pair(strategy)
    with raises(LowtideError, "BatchNormAct2d", "strategy='checkpoint'"):
        layer(*torch.randn(2, *SMALL))


@pytest.mark.parametrize(
    "residual",
    [
        torch.randn(SMALL).contiguous(memory_format=torch.channels_last),
        torch.randn(1, 4, 1, 1),
        torch.randn(5, 1, 3, 3).expand(SMALL),
        torch.randn(SMALL, dtype=torch.float64),
        torch.randn(SMALL, dtype=torch.bfloat16),
    ],
    ids=["channels last", "broadcast", "expanded", "wider", "narrower"],
)
def test_any_residual_that_torch_can_add_gives_torchs_step(residual):
    layer, plain = pair("checkpoint")
    x, gradient = torch.randn(2, *SMALL)
    dtype = torch.promote_types(x.dtype, residual.dtype)
    actual = step(layer, x, gradient.to(dtype), residual)
    expected = step(plain, x, gradient.to(dtype), residual)
    # A residual of 16 bits gets a gradient of 16 bits.
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("residual", [lambda leaf: leaf, lambda leaf: torch.ones(SMALL)], ids=["x", "no gradient"])
def test_a_join_with_its_own_input_or_without_a_gradient_of_the_residual_is_torchs(residual):
    x = torch.randn(SMALL)

    def run(model):
        leaf = x.clone().requires_grad_()
        model(leaf, residual(leaf)).square().sum().backward()
        return [leaf.grad, *(p.grad for p in model.parameters())]

    assert_same(run, *pair("checkpoint", "silu"))


def test_a_residual_written_over_after_the_join_is_an_error_that_names_the_layer():
    layer, _ = pair("checkpoint")
    x, residual = torch.randn(2, *SMALL, requires_grad=True)
    residual = residual * 1
    z = layer(x, residual)
    residual.add_(1)
    with raises(LowtideError, "BatchNormAct2d(4"):
        z.sum().backward()


class Block(nn.Module):
    """conv-bn-act-conv-bn, added to the input, act."""

    def __init__(self, strategy, rebuild_joins, width=CHANNELS):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
        if strategy is None:
            self.inner, self.join = (Plain(nn.BatchNorm2d(width), nn.ReLU()) for _ in range(2))
        else:
            self.inner = BatchNormAct2d(width, "relu", strategy)
            self.join = BatchNormAct2d(width, "relu", "checkpoint", rebuild_joins=rebuild_joins)

    def forward(self, x):
        return self.join(self.convs[1](self.inner(self.convs[0](x))), x)


def chain(strategy, rebuild_joins=(True,) * 4, width=CHANNELS):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(width, width, 3, padding=1), *(Block(strategy, joined, width) for joined in rebuild_joins),
        nn.Conv2d(width, width, 3, padding=1),
    )  # fmt: skip


JOINS = {
    "all rebuilt": (True, True, True, True),
    "none": (False, False, False, False),
    "every second kept": (True, False, True, False),
    "the first kept": (False, True, True, True),
}


@pytest.mark.parametrize("joins", JOINS)
@pytest.mark.parametrize("strategy", CHECKPOINTS)
def test_a_chain_of_blocks_is_torchs(strategy, joins):
    x = torch.randn(SMALL, dtype=torch.float64)

    def run(model):
        loss = model(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        return [*(p.grad for p in model.parameters()), *model.buffers()]

    assert_same(run, chain(strategy, JOINS[joins], width=4).double(), chain(None, width=4).double())


@pytest.mark.parametrize(
    ("joins", "count"),
    [("all rebuilt", 1 + 8), ("none", 1 + 8 + 4), ("every second kept", 1 + 8 + 2), ("the first kept", 1 + 8 + 1)],
)
def test_a_join_keeps_one_buffer_and_one_more_where_its_z_is_kept(joins, count):
    """Each block keeps the inputs of its two batch norms; the first convolution's output is the first residual."""
    model, x = chain("checkpoint", JOINS[joins]), torch.randn(LARGE)
    assert kept_by_allocator(model, x) == kept_by_profile(model, x) == count


def test_a_chain_saves_at_its_peak_what_is_not_rebuilt_at_once():
    """A join is rebuilt from the ones before it, back to one that is kept: those are alive together."""
    x = torch.randn(LARGE)

    def peak(*joins):
        return allocated_peak(chain("checkpoint", joins), mean_loss, x, None)

    plain = allocated_peak(chain(None, (True,) * 8), mean_loss, x, None)
    saved, rebuilt = peak(*(False,) * 8), peak(*(True,) * 8)
    every_fourth = peak(*(True, True, True, False) * 2)
    some = FULL // 2  # values per channel
    assert saved <= plain - 8 * FULL + FULL + some
    assert rebuilt <= saved + some
    assert every_fourth <= saved - 3 * FULL + some


@pytest.mark.parametrize("shape", [(2, 1, 1), (1, 2, 1, 1), (), (600,)], ids=str)
def test_a_broadcast_residual_of_a_large_input(shape):
    x, residual = torch.randn(2, 2, 512, 600), torch.randn(shape)

    def run(model):
        leaf, added = x.clone().requires_grad_(), residual.clone().requires_grad_()
        z = model(leaf, added)
        z.square().sum().backward()
        return z, leaf.grad, added.grad

    assert_same(run, BatchNormAct2d(2), Plain(nn.BatchNorm2d(2), nn.ReLU()), rtol=1e-4, atol=1e-3)  # sums of 600,000


# -- random layers -------------------------------------------------------------------------------------


EXAMPLES = count(40, soak=600)
shapes = st.tuples(st.integers(1, 5), st.integers(1, 5)).flatmap(
    lambda start: st.lists(st.integers(1, 4), max_size=3).map(lambda spatial: (*start, *spatial))
)
weights = st.sampled_from([1.0, -1.0, 0.0, 0.3, -2.5, 1e-3, -1e-8, 30.0])
biases = st.sampled_from([0.0, 0.1, -1.0, 5.0, -20.0, 1e4])
layouts = st.tuples(st.permutations(range(5)), st.lists(st.integers(1, 3), min_size=5, max_size=5), st.integers(0, 3))


def laid_out(values, layout):
    """The same values with dimensions in another order in memory, every n-th of them, behind an offset."""
    order, steps, offset = layout
    order = [axis for axis in order if axis < values.dim()]
    sizes = [values.shape[axis] * steps[axis] for axis in order]
    base = torch.full((offset + torch.Size(sizes).numel(),), float("nan"), dtype=values.dtype)[offset:].view(sizes)
    back = [order.index(axis) for axis in range(values.dim())]
    view = base.permute(back)[tuple(slice(None, None, steps[axis]) for axis in range(values.dim()))]
    return view.copy_(values)


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(
    data=st.data(),
    shape=shapes,
    activation=st.sampled_from(sorted(ACTIVATIONS)),
    of_input=layouts,
    of_gradient=layouts,
    affine=st.booleans(),
    tracked=st.booleans(),
    training=st.booleans(),
    momentum=st.sampled_from([0.1, 1.0, 0.0, None]),
    eps=st.sampled_from([1e-5, 1e-2, 1.0]),
    mean=st.sampled_from([0.0, -3.0, 1e4]),
    seed=st.integers(0, 3),
)
def test_random_layers_give_torchs_step(
    data, shape, activation, of_input, of_gradient, affine, tracked, training, momentum, eps, mean, seed
):
    strategy = data.draw(st.sampled_from([s for s in ONE_BUFFER if s not in IN_PLACE or activation in INVERTIBLE]))
    dims, channels = max(len(shape) - 2, 1), shape[1]
    options = {"affine": affine, "track_running_stats": tracked, "momentum": momentum, "eps": eps}
    torch.manual_seed(seed)
    layer = LAYERS[dims](channels, ACTIVATIONS[activation](), strategy, **options).double().train(training)
    plain = Plain(NORMS[dims](channels, **options), ACTIVATIONS[activation]()).double().train(training)
    for norm in (layer, plain.norm):
        with torch.no_grad():
            if affine:
                norm.weight.copy_(torch.tensor(data.draw(st.lists(weights, min_size=channels, max_size=channels))))
                norm.bias.copy_(torch.tensor(data.draw(st.lists(biases, min_size=channels, max_size=channels))))
            if norm is plain.norm:
                norm.load_state_dict({n: t for n, t in layer.state_dict().items() if not n.startswith("activation")})
    x = laid_out(torch.randn(shape, dtype=torch.float64) + mean, of_input)
    gradient = laid_out(torch.randn(shape, dtype=torch.float64), of_gradient)
    if (training or not tracked) and x.numel() == channels:
        for model in (layer, plain):
            with raises(ValueError, "1 value"):
                model(x)
        return
    same_layout = copy.deepcopy(plain)
    strides = strides_of(same_layout(x))
    # Gradients not from these layouts: ATen's backward mistakes them where a dimension is 1 (torch 2.13, on a CPU).
    actual, expected = step(layer, x, gradient), step(plain, x.contiguous(), gradient.contiguous())
    # With a small m and a σ near 0, dx is a difference of values as large as 1/σ.
    steepest = float(expected_slope(plain.norm, x, eps))
    torch.testing.assert_close(actual, expected, atol=1e-7 * max(1.0, steepest), rtol=1e-7)
    assert strides_of(actual[0]) == strides
    for (name, mine), torchs in zip(layer.named_buffers(), same_layout.norm.buffers(), strict=True):
        assert torch.equal(mine, torchs), name


def strides_of(tensor):
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def expected_slope(norm, x, eps):
    var = x.transpose(0, 1).flatten(1).var(1, correction=0)
    weight = 1.0 if norm.weight is None else norm.weight.detach().abs()
    return (weight / torch.sqrt(var + eps)).max()
