"""The corners: parameters that lose x, odd layouts and shapes, mixed dtypes."""

import pytest
import torch
from torch import nn

from lowtide.nn import BatchNormAct1d, BatchNormAct2d, BatchNormAct3d
from tests.nn.plain import (
    ACTIVATIONS,
    CHECKPOINTS,
    IN_PLACE,
    INVERTIBLE,
    LAYERS,
    ONE_BUFFER,
    Plain,
    assert_same_statistics,
    assert_same_step,
    pair,
    step,
)

SHAPE = (6, 4, 5, 3)
EVERY = [(s, a) for s in (*CHECKPOINTS, *IN_PLACE) for a in ACTIVATIONS if s not in IN_PLACE or a in INVERTIBLE]


def set_affine(layer, plain, weight, bias):
    for norm in (layer, plain.norm):
        with torch.no_grad():
            norm.weight.copy_(torch.as_tensor(weight))
            norm.bias.copy_(torch.as_tensor(bias))


# -- parameters ----------------------------------------------------------------------------------------


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


# -- layouts -------------------------------------------------------------------------------------------


def channels_last(x):
    return x.contiguous(memory_format=torch.channels_last)


LAYOUTS = {
    "contiguous": lambda x: x,
    "channels last": channels_last,
    "transposed": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "every second": lambda x: x.repeat_interleave(2, dim=3)[..., ::2],
    "a slice of channels": lambda x: torch.cat([x, x], dim=1)[:, : x.shape[1]],
    "batch last": lambda x: x.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2),
}


@pytest.mark.parametrize("of_input", LAYOUTS)
@pytest.mark.parametrize("strategy", ONE_BUFFER)
def test_any_layout_of_inputs_and_gradients_gives_torchs_step(strategy, of_input):
    layer, plain = pair(strategy)
    x, gradient = torch.randn(2, *SHAPE)
    expected = step(plain, x, gradient)
    for of_gradient in LAYOUTS.values():
        layer.zero_grad()
        found = step(layer, LAYOUTS[of_input](x), of_gradient(gradient))
        torch.testing.assert_close(found, expected)
        assert found[0].stride() == plain(LAYOUTS[of_input](x)).stride()


@pytest.mark.parametrize("strategy", ONE_BUFFER)
@pytest.mark.parametrize("shape", [(1, 4, 5, 6), (3, 4, 1, 6), (3, 4, 5, 1), (1, 4, 1, 6), (3, 1, 5, 6)], ids=str)
def test_any_layout_is_right_where_a_dimension_is_1(strategy, shape):
    """There torch's own gradients are wrong for some pairs of layouts (2.13, on a CPU): none is taken as the truth."""
    layer, plain = pair(strategy, channels=shape[1])
    layer.double()
    x, gradient = torch.randn(2, *shape, dtype=torch.float64)
    expected = step(plain.double(), x, gradient)
    for of_input in LAYOUTS.values():
        for order in ((0, 2, 3, 1), (2, 3, 0, 1), (2, 0, 3, 1), (1, 0, 2, 3)):
            layer.zero_grad()
            back = [order.index(axis) for axis in range(4)]
            laid_out = gradient.permute(order).contiguous().permute(back)
            torch.testing.assert_close(step(layer, of_input(x), laid_out), expected)


@pytest.mark.parametrize(("strategy", "activation"), EVERY)
@pytest.mark.parametrize("dims", [2, 3])
def test_channels_last_stays_channels_last(strategy, activation, dims):
    layer, _ = pair(strategy, activation, dims=dims)
    layout = torch.channels_last if dims == 2 else torch.channels_last_3d
    x = torch.randn(3, 4, *(5,) * dims).contiguous(memory_format=layout).requires_grad_()
    z = layer(x)
    assert z.is_contiguous(memory_format=layout)
    z.backward(torch.randn_like(z))
    assert x.grad.is_contiguous(memory_format=layout)


@pytest.mark.parametrize(("strategy", "activation"), EVERY)
def test_an_expanded_gradient_gives_torchs_gradients(strategy, activation):
    layer, plain = pair(strategy, activation)
    x = torch.randn(SHAPE)
    gradients = []
    for model in (layer, plain):
        leaf = x.clone().requires_grad_()
        model(leaf).mul(torch.arange(4.0).view(4, 1, 1)).sum((1, 2, 3)).sum().backward()
        gradients.append([leaf.grad, *(p.grad for p in model.parameters())])
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1.3e-6)  # dx is 0 but for the rounding of sums of 90


@pytest.mark.parametrize("strategy", ONE_BUFFER)
def test_a_sum_gives_torchs_gradients(strategy):
    layer, plain = pair(strategy)
    x = torch.randn(SHAPE)
    assert_same_step(layer, plain, x, torch.ones(()).expand(SHAPE))


# -- shapes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ONE_BUFFER)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", [(0, 4, 5, 3), (2, 4, 0, 3)])
def test_an_empty_batch_is_as_in_torch(strategy, training, shape):
    layer, plain = pair(strategy)
    layer.train(training)
    plain.train(training)
    x, gradient = torch.randn(2, *shape)
    try:
        expected = step(plain, x, gradient)
    except (RuntimeError, ValueError) as error:
        with pytest.raises(type(error)):
            step(layer, x, gradient)
        return
    torch.testing.assert_close(step(layer, x, gradient), expected, equal_nan=True)
    torch.testing.assert_close(list(layer.buffers()), list(plain.norm.buffers()), equal_nan=True)


@pytest.mark.parametrize("strategy", ONE_BUFFER)
@pytest.mark.parametrize("grad", [True, False])
def test_one_value_per_channel_is_torchs_error(strategy, grad):
    layer, plain = pair(strategy)
    x = torch.randn(1, 4, 1, 1, requires_grad=grad)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training") as torchs:
        plain(x)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training") as ours:
        layer(x)
    assert str(ours.value) == str(torchs.value)
    layer.eval()
    plain.eval()
    assert_same_step(layer, plain, x.detach(), torch.randn(1, 4, 1, 1))


@pytest.mark.parametrize("strategy", ONE_BUFFER)
@pytest.mark.parametrize("shape", [(7, 4), (7, 4, 6), (7, 4, 1), (1, 4, 6)], ids=str)
def test_a_1d_layer_takes_what_torchs_takes(strategy, shape):
    layer, plain = pair(strategy, dims=1)
    x, gradient = torch.randn(2, *shape)
    assert_same_step(layer, plain, x, gradient)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (BatchNormAct1d, (2, 3, 4, 5)),
        (BatchNormAct1d, (4,)),
        (BatchNormAct2d, (2, 3, 4)),
        (BatchNormAct3d, (2, 3, 4, 5)),
    ],
)
def test_wrong_dimensions_are_torchs_error(layer, shape):
    with pytest.raises(ValueError, match="input"):
        layer(3)(torch.randn(shape))


@pytest.mark.parametrize("strategy", ONE_BUFFER)
def test_a_wrong_number_of_channels_is_an_error(strategy):
    layer, plain = pair(strategy)
    for model in (layer, plain):
        with pytest.raises(RuntimeError):
            model(torch.randn(2, 5, 3, 3, requires_grad=True))


# -- dtypes --------------------------------------------------------------------------------------------


def dtypes(model, x, gradient):
    found = step(model, x, gradient)
    return [t.dtype for t in found], [b.dtype for b in model.buffers()]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("strategy", "activation"), EVERY)
def test_dtypes_are_torchs_with_inputs_alone_or_the_whole_model_in_16_bits(strategy, activation, dtype):
    layer, plain = pair(strategy, activation)
    x, gradient = torch.randn(2, *SHAPE).to(dtype)
    if activation == "prelu":  # torch's own needs its slopes in the dtype of its input
        layer.activation.to(dtype)
        plain.activation.to(dtype)
    assert dtypes(layer, x, gradient) == dtypes(plain, x, gradient)
    layer.to(dtype).zero_grad()
    plain.to(dtype).zero_grad()
    assert dtypes(layer, x, gradient) == dtypes(plain, x, gradient)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("strategy", ONE_BUFFER)
@pytest.mark.parametrize("whole", [True, False], ids=["whole model", "inputs alone"])
def test_statistics_after_twenty_steps_in_16_bits_are_torchs(strategy, dtype, whole):
    layer, plain = pair(strategy)
    if whole:
        layer.to(dtype)
        plain.to(dtype)
    for _ in range(20):
        x = (torch.randn(SHAPE) * 3 + 2).to(dtype)
        for model in (layer, plain):
            model(x.clone().requires_grad_()).sum().backward()
    for name, expected in plain.norm.named_buffers():
        assert torch.equal(getattr(layer, name), expected), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("strategy", "activation"), EVERY)
def test_under_autocast_a_model_has_torchs_dtypes_and_values(strategy, activation, dtype):
    layer, plain = pair(strategy, activation)
    torch.manual_seed(1)
    first, last = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1)
    x = torch.randn(SHAPE)
    results = []
    for middle in (layer, plain):
        model = nn.Sequential(first, middle, last)
        model.zero_grad()
        shown = []
        handle = middle.register_forward_hook(lambda m, args, out, shown=shown: shown.append(out.dtype))
        with torch.autocast("cpu", dtype):
            out = model(x)
        handle.remove()
        out.float().square().sum().backward()
        results.append((shown, out, [p.grad.clone() for p in (*first.parameters(), *last.parameters())]))
    (ours, out, grads), (theirs, expected, torchs) = results
    assert ours == theirs
    assert out.dtype is expected.dtype
    if strategy == "checkpoint":
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(grads, torchs)
    assert_same_statistics(layer, plain.norm)


@pytest.mark.parametrize("dims", LAYERS)
def test_a_layer_is_made_on_a_device_and_in_a_dtype(dims):
    layer = LAYERS[dims](4, "prelu", dtype=torch.float64, device="meta")
    kinds = {(t.dtype, t.device.type) for name, t in layer.state_dict().items() if name != "num_batches_tracked"}
    assert kinds == {(torch.float64, "meta")}


def test_prelu_by_name_learns():
    layer = BatchNormAct2d(4, "prelu")
    plain = Plain(nn.BatchNorm2d(4), nn.PReLU())
    x, gradient = torch.randn(2, *SHAPE)
    assert_same_step(layer, plain, x, gradient)
    assert layer.activation.weight.grad is not None
