"""BatchNormAct is batch norm and its activation; to ``state_dict`` and to copies it is a plain batch norm."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from lowtide import LowtideError
from lowtide.nn import BatchNormAct2d, BatchRenormAct2d
from tests.nn.buffers import LARGE, kept_by_allocator, network
from tests.nn.plain import (
    ACTIVATIONS,
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
    head, x = nn.Conv2d(4, 2, 1), torch.randn(5, 4, 3, 3)

    def run(stem):
        head.zero_grad()
        nn.Sequential(stem.requires_grad_(False), head)(x).square().sum().backward()
        return head.weight.grad

    assert_same(run, layer, plain)
    assert_same_statistics(layer, plain.norm)


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
    with raises(LowtideError, "BatchNorm1d"):
        BatchNormAct2d.from_batch_norm(nn.BatchNorm1d(4), "relu")


@pytest.mark.parametrize(("dims", "shape"), [(1, (2, 3, 4, 5)), (1, (4,)), (2, (2, 3, 4)), (3, (2, 3, 4, 5))])
def test_wrong_dimensions_are_torchs_error(dims, shape):
    errors = []
    for layer in (LAYERS[dims](3), NORMS[dims](3)):
        with pytest.raises(ValueError, match="expected") as error:
            layer(torch.randn(shape))
        errors.append(str(error.value))
    assert errors[0] == errors[1]


@pytest.mark.parametrize("dims", LAYERS)
def test_a_layer_is_made_on_a_device_and_in_a_dtype(dims):
    layer = LAYERS[dims](4, "prelu", dtype=torch.float64, device="meta")
    kinds = {(t.dtype, t.device.type) for name, t in layer.state_dict().items() if name != "num_batches_tracked"}
    assert kinds == {(torch.float64, "meta")}


# -- state, copies and torch.fx ------------------------------------------------------------------------


OPTIONS = [
    {},
    {"bias": False},
    {"affine": False},
    {"track_running_stats": False},
    {"affine": False, "track_running_stats": False},
    {"dtype": torch.float64},
    {"dtype": torch.bfloat16},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dims", LAYERS)
def test_the_state_dict_is_a_batch_norms_and_loads_both_ways(dims, options):
    if "bias" in options and torch.__version__ < "2.13":
        pytest.skip("a batch norm of torch 2.11 always has a bias")
    torch.manual_seed(0)
    norm, layer = NORMS[dims](6, **options), LAYERS[dims](6, "silu", **options)
    torch.testing.assert_close(dict(layer.state_dict()), dict(norm.state_dict()), rtol=0, atol=0)
    assert list(layer.state_dict()) == list(norm.state_dict())
    for tensor in norm.state_dict().values():
        tensor.copy_(torch.randint(1, 9, tensor.shape))
    layer.load_state_dict(norm.state_dict())
    back = NORMS[dims](6, **options)
    back.load_state_dict(layer.state_dict())
    torch.testing.assert_close(dict(back.state_dict()), dict(norm.state_dict()), rtol=0, atol=0)


def test_state_of_an_old_version_loads_as_into_a_batch_norm():
    """Before version 2 there was no num_batches_tracked."""
    old = {name: t for name, t in nn.BatchNorm2d(4).state_dict().items() if name != "num_batches_tracked"}
    for norm in (nn.BatchNorm2d(4), BatchNormAct2d(4)):
        norm.load_state_dict(old)
        assert norm.num_batches_tracked == 0


def by_pickle(layer):
    return pickle.loads(pickle.dumps(layer))


def by_torch_save(layer):
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, by_pickle, by_torch_save])
@pytest.mark.parametrize(
    ("strategy", "activation"),
    [("inplace", "leaky_relu"), *(("checkpoint", a) for a in ("gelu_tanh", "prelu", "mish"))],
)
def test_a_copy_does_what_the_layer_does_and_shares_nothing(copied, strategy, activation):
    layer, plain = pair(strategy, activation)
    twin, before = copied(layer), copy.deepcopy(layer.state_dict())
    assert repr(twin) == repr(layer)
    x, gradient = torch.randn(2, 5, 4, 3, 3)
    assert_same_step(twin, plain, x, gradient)
    torch.testing.assert_close(layer.state_dict(), before, rtol=0, atol=0)
    assert all(p.grad is None for p in layer.parameters())


@pytest.mark.parametrize("copied", [copy.deepcopy, by_pickle, by_torch_save])
def test_a_model_copied_after_a_step_keeps_one_buffer_too(copied):
    model, x = network(nn.SiLU(), "checkpoint"), torch.randn(LARGE)
    model(x).sum().backward()
    model.zero_grad()
    twin = copied(model)
    assert_same(lambda net: torch.autograd.grad(net(x).square().sum(), list(net.parameters())), twin, model)
    assert kept_by_allocator(twin, x) == 2


def test_torch_fx_has_a_layer_for_a_leaf():
    model = nn.Sequential(nn.Conv2d(4, 4, 1), BatchNormAct2d(4, "silu"), BatchRenormAct2d(4))
    traced, x = torch.fx.symbolic_trace(copy.deepcopy(model)), torch.randn(3, 4, 6, 6)
    assert [n.target for n in traced.graph.nodes if n.op == "call_module"] == ["0", "1", "2"]
    assert torch.equal(traced(x), model(x))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_what_is_printed_says_the_activation_and_the_strategy(activation):
    layer, _ = pair("checkpoint", activation)
    shown = repr(layer)
    assert shown.startswith("BatchNormAct2d(4, ")
    assert activation.partition("_tanh")[0] in shown.lower()
    assert "strategy='checkpoint'" in shown
