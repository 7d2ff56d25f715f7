"""To ``state_dict`` the layers are plain batch norms, and they can be copied, pickled, saved and traced."""

import copy
import importlib.util
import io
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lowtide.nn import BatchNormAct2d, BatchRenormAct2d
from tests.nn.plain import ACTIVATIONS, LAYERS, NORMS, ONE_BUFFER, assert_same_step, pair, step
from tests.nn.test_kept import SHAPE, kept_by_allocator, network

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
def test_the_state_dict_is_a_batch_norms(dims, options):
    ours = LAYERS[dims](6, "silu", **options).state_dict()
    torchs = NORMS[dims](6, **options).state_dict()
    assert list(ours) == list(torchs)
    assert [(t.shape, t.dtype) for t in ours.values()] == [(t.shape, t.dtype) for t in torchs.values()]
    torch.testing.assert_close(dict(ours), dict(torchs), rtol=0, atol=0)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dims", LAYERS)
def test_state_loads_both_ways(dims, options):
    torch.manual_seed(0)
    norm, layer = NORMS[dims](6, **options), LAYERS[dims](6, **options)
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


def test_missing_and_unexpected_keys_are_errors():
    state = nn.BatchNorm2d(4).state_dict()
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"extra"'):
        BatchNormAct2d(4).load_state_dict({**state, "extra": torch.zeros(1)})
    del state["running_var"]
    with pytest.raises(RuntimeError, match=r'Missing key.*"running_var"'):
        BatchNormAct2d(4).load_state_dict(state)


def non_reentrant(function, x):
    return checkpoint(function, x, use_reentrant=False)


def reentrant(function, x):
    return checkpoint(function, x, use_reentrant=True)


def nested(function, x):
    return non_reentrant(lambda x: non_reentrant(function, x), x)


@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("run", [non_reentrant, reentrant, nested])
@pytest.mark.parametrize("strategy", ["standard", *ONE_BUFFER])
def test_recompute_updates_running_stats_once(strategy, run, momentum, autocast):
    layer, plain = pair(strategy, momentum=momentum)
    x, gradient = torch.randn(2, 5, 4, 3, 3)
    made = []
    for model, call in ((layer, run), (plain, lambda function, x: function(x))):
        net = nn.Sequential(nn.Conv2d(4, 4, 1), model)
        nn.init.dirac_(net[0].weight)
        nn.init.zeros_(net[0].bias)
        leaf = x.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            call(net, leaf).backward(gradient.bfloat16() if autocast else gradient)
        made.append([leaf.grad, *(p.grad for p in net.parameters())])
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if autocast else {}  # the plain layers round twice to 16 bits
    torch.testing.assert_close(made[0], made[1], **tolerance)
    for name, buffer in plain.norm.named_buffers():
        torch.testing.assert_close(getattr(layer, name), buffer)
    assert layer.num_batches_tracked == 1


def test_resetting_parameters_is_a_batch_norms():
    layer, _ = pair("checkpoint")
    layer.reset_parameters()
    torch.testing.assert_close(dict(layer.state_dict()), dict(nn.BatchNorm2d(4).state_dict()))


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
    [(s, "leaky_relu") for s in ONE_BUFFER] + [("checkpoint", a) for a in ("gelu_tanh", "prelu", "mish")],
)
def test_a_copy_does_what_the_layer_does_and_shares_nothing(copied, strategy, activation):
    layer, plain = pair(strategy, activation)
    made = copied(layer)
    assert repr(made) == repr(layer)
    before = copy.deepcopy(layer.state_dict())
    x, gradient = torch.randn(2, 5, 4, 3, 3)
    assert_same_step(made, plain, x, gradient)
    torch.testing.assert_close(layer.state_dict(), before, rtol=0, atol=0)
    assert all(p.grad is None for p in layer.parameters())


@pytest.mark.parametrize("copied", [copy.deepcopy, by_pickle, by_torch_save])
def test_a_copied_model_keeps_one_buffer_too(copied):
    model = copied(network(nn.SiLU(), "checkpoint"))
    assert kept_by_allocator(model, torch.randn(SHAPE)) == 2


def test_a_model_can_be_copied_after_a_step():
    model, x = network(nn.SiLU(), "checkpoint"), torch.randn(SHAPE)
    model(x).sum().backward()
    made = copy.deepcopy(model)
    for net in (model, made):
        net.zero_grad()
        net(x).square().sum().backward()
    torch.testing.assert_close([p.grad for p in made.parameters()], [p.grad for p in model.parameters()])


def test_torch_fx_has_a_layer_for_a_leaf():
    model = nn.Sequential(nn.Conv2d(4, 4, 1), BatchNormAct2d(4, "silu"), BatchRenormAct2d(4))
    traced, x = torch.fx.symbolic_trace(copy.deepcopy(model)), torch.randn(3, 4, 6, 6)
    assert [n.target for n in traced.graph.nodes if n.op == "call_module"] == ["0", "1", "2"]
    assert torch.equal(traced(x), model(x))


@pytest.mark.parametrize("strategy", ONE_BUFFER)
def test_tracing_in_eval_mode_agrees(strategy):
    layer, plain = pair(strategy)
    model = nn.Sequential(nn.Conv2d(4, 4, 1), layer, nn.Conv2d(4, 4, 1)).eval()
    traced = torch.jit.trace(model, torch.randn(2, 4, 5, 5))
    x = torch.randn(3, 4, 6, 6)
    torch.testing.assert_close(traced(x), nn.Sequential(model[0], plain.eval(), model[2])(x))


@pytest.mark.parametrize("strategy", ONE_BUFFER)
def test_exporting_in_eval_mode_agrees(strategy):
    layer, plain = pair(strategy)
    model = nn.Sequential(nn.Conv2d(4, 4, 1), layer).eval()
    x = torch.randn(2, 4, 5, 5)
    exported = torch.export.export(model, (x,)).module()
    torch.testing.assert_close(exported(x), nn.Sequential(model[0], plain.eval())(x))


@pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("onnx", "onnxscript", "onnxruntime")), reason="needs onnx"
)
def test_onnx_in_eval_mode_agrees(tmp_path):
    import onnxruntime

    layer, plain = pair("checkpoint")
    x = torch.randn(2, 4, 5, 5)
    torch.onnx.export(layer.eval(), (x,), str(tmp_path / "layer.onnx"))
    session = onnxruntime.InferenceSession(str(tmp_path / "layer.onnx"))
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), plain.eval()(x))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_what_is_printed_says_the_activation_and_the_strategy(activation):
    layer, _ = pair("checkpoint", activation)
    shown = repr(layer)
    assert shown.startswith("BatchNormAct2d(4, ")
    assert activation.partition("_tanh")[0] in shown.lower()
    assert "strategy='checkpoint'" in shown


def test_moving_to_another_dtype_moves_what_the_activation_learns():
    layer, plain = pair("checkpoint", "prelu")
    x, gradient = torch.randn(2, 5, 4, 3, 3, dtype=torch.float64)
    found, expected = step(layer.double(), x, gradient), step(plain.double(), x, gradient)
    torch.testing.assert_close(found, expected)
