"""Torch's own ops where nothing of lowtide's can run: compiled, exported, traced and under ``torch.func``."""

import importlib.util
import math
from functools import partial

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import TorchRuntimeError
from torch._dynamo.utils import counters
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch.func import functional_call, grad, vmap
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lowtide.nn import BatchNormAct2d
from tests.nn.plain import ACTIVATIONS, ONE_BUFFER, Plain, batch, networks, pair
from tests.nn.raising import raises
from tests.soak import in_soak

# Dynamo looks at .grad of what it compiles, and its own warning must not stop it.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


CHANNELS, BATCH = 4, (2, 4, 6, 6)


@pytest.fixture(autouse=True)
def _nothing_compiled():
    torch._dynamo.reset()
    counters.clear()


class Net(nn.Module):
    """conv-bn-act-conv-bn-act-conv, where the second bn-act may join the first one's output."""

    def __init__(self, layer, *, joined=False):
        super().__init__()
        torch.manual_seed(0)
        self.convs = nn.ModuleList(nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False) for _ in range(3))
        self.first, self.second = layer(), layer()
        self.joined = joined
        self.double()

    def forward(self, x):
        z = self.first(self.convs[0](x))
        y = self.convs[1](z)
        return self.convs[2](self.second(y, z) if self.joined else self.second(y))


def nets(activation="relu", strategy="auto", *, joined=False, **options):
    """One of lowtide's layers and one of torch's, with the same parameters."""

    def ours():
        return BatchNormAct2d(CHANNELS, ACTIVATIONS[activation](), strategy, **options)

    def plain():
        return Plain(nn.BatchNorm2d(CHANNELS, **options), ACTIVATIONS[activation]())

    return Net(ours, joined=joined), Net(plain, joined=joined)


def assert_same_steps(model, plain, call, *, steps=3, batches=None):
    """Outputs, summed gradients, running statistics and their counts are those of plain eager torch."""
    torch.manual_seed(1)
    for step in range(steps):
        shape = BATCH if batches is None else (batches[step], *BATCH[1:])
        x = torch.randn(shape, dtype=torch.float64)
        actual, expected = call(x), plain(x)
        torch.testing.assert_close(actual, expected)
        actual.square().sum().backward()
        expected.square().sum().backward()
    for ours, theirs in zip(parameters(model), parameters(plain), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    for ours, theirs in zip(model.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs)


def parameters(model):
    return (p for _, p in sorted(model.named_parameters(), key=lambda named: named[0].replace("norm.", "")))


class Graphs:
    """A backend that partitions as Inductor does, runs the graphs as they are, and shows what goes between them."""

    def __init__(self):
        self.forward = self.backward = None
        self.backend = aot_autograd(
            fw_compiler=self._take_forward,
            bw_compiler=self._take_backward,
            decompositions=select_decomp_table(),
            partition_fn=lambda joint, *args, **kwargs: min_cut_rematerialization_partition(
                joint_graph_passes(joint), *args, **kwargs
            ),
        )

    def _take_forward(self, graph, inputs):
        self.forward = graph
        return make_boxed_func(graph.forward)

    def _take_backward(self, graph, inputs):
        self.backward = graph
        return make_boxed_func(graph.forward)

    def step(self, model):
        x = torch.randn(BATCH, dtype=torch.float64)
        torch.compile(model, fullgraph=True, backend=self.backend)(x).square().sum().backward()
        return self

    @property
    def retained(self):
        """Buffers of full size that are kept between forward and backward, the net's input aside."""
        given = self.backward.graph.find_nodes(op="placeholder")
        others = ("tangents", "primals", "detach")  # the last are views of one that is kept
        return [n.meta["val"] for n in given if n.meta["val"].shape == BATCH and not n.name.startswith(others)]

    @property
    def reductions(self):
        """How often the forward graph computes statistics."""
        return len(self.forward.graph.find_nodes(op="call_function", target=torch.ops.aten.var_mean.correction))


TRAINED = [  # activation, strategy, whether it joins, options
    *((name, "auto", False, {}) for name in ("relu", "identity", *in_soak(["prelu"]))),
    ("relu", "auto", True, {}),
    ("leaky_relu", "inplace", False, {}),
    ("relu", "auto", False, {"momentum": None}),
    *in_soak([("relu", "auto", False, {"affine": False})]),
    *in_soak((name, "auto", joined, {}) for name in ("silu", "gelu_tanh", "softplus") for joined in (False, True)),
    *in_soak(("leaky_relu", strategy, False, {}) for strategy in ("checkpoint", "checkpoint_xhat", "inplace2")),
    *in_soak(("relu", "auto", False, options) for options in ({"track_running_stats": False}, {"eps": 0.1})),
]


@pytest.mark.parametrize(("activation", "strategy", "joined", "options"), TRAINED, ids=str)
def test_training_is_that_of_plain_torch_and_one_buffer_is_kept_per_layer(activation, strategy, joined, options):
    model, plain = nets(activation, strategy, joined=joined, **options)
    graphs = Graphs()
    assert_same_steps(model, plain, torch.compile(model, fullgraph=True, backend=graphs.backend))
    assert counters["stats"]["unique_graphs"] == 1  # no graph break, nothing compiled again
    if activation == "relu" or not joined:  # other joins keep y too
        assert len(graphs.retained) == 2 + joined
    if not options:
        assert graphs.reductions == 2  # the batch norm's and the running statistics' are one


def test_other_sizes_of_batches_compile_once_more_and_eager_still_works():
    model, plain = nets("relu")
    call = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_same_steps(model, plain, call, batches=(2, 3, 5))
    assert counters["stats"]["unique_graphs"] == 2  # one for a batch of 2, one for all others
    assert_same_steps(model, plain, model)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_one_value_per_channel_is_refused_as_torch_does(momentum):
    layer = BatchNormAct2d(CHANNELS, momentum=momentum)
    with raises(TorchRuntimeError, "1 value"):
        torch.compile(layer, backend="aot_eager")(torch.randn(1, CHANNELS, 1, 1))


# Inductor's C++ takes 20 s to compile. By default its decompositions and its partitioner run without it.
COMPILED = [
    ("aot_eager_decomp_partition", False),
    *in_soak([("inductor", False), ("inductor", True), ("model.compile()", False)]),
]


@pytest.mark.parametrize(("backend", "joined"), COMPILED)
def test_inductor_trains_as_plain_torch_does_and_keeps_one_buffer_per_layer(backend, joined):
    model, plain = (net.to(memory_format=torch.channels_last) for net in nets("relu", joined=joined))
    call = model
    if backend == "model.compile()":
        model.compile(fullgraph=True)
    else:
        call = torch.compile(model, fullgraph=True, backend=backend)
    assert_same_steps(model, plain, call)
    out = call(torch.randn(BATCH, dtype=torch.float64))
    saved = [*out.grad_fn.saved_tensors, *getattr(out.grad_fn, "_tensors_no_vc_check", [])]
    assert sum(t.numel() == out.numel() for t in saved) == 3 + joined  # the net's input is one


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")  # inductor's own first one
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_inductor_and_cuda_graphs_train_as_plain_torch_does(mode):
    model, plain = (net.float().cuda() for net in nets("relu", joined=True))
    call = torch.compile(model, fullgraph=True, mode=mode)
    torch.manual_seed(1)
    for _ in range(6):  # a CUDA graph is recorded in the second call and replayed from the third
        x = torch.randn(BATCH, device="cuda")
        for net, run in ((model, call), (plain, plain)):
            net.zero_grad()
            torch.compiler.cudagraph_mark_step_begin()
            run(x).square().sum().backward()
        for ours, theirs in zip(parameters(model), parameters(plain), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4)
        for ours, theirs in zip(model.buffers(), plain.buffers(), strict=True):
            torch.testing.assert_close(ours, theirs)


def error(model, exact):
    """That of all gradients together, each relative to its own size."""
    pairs = zip(parameters(model), parameters(exact), strict=True)
    return sum(((p.grad - true.grad).norm() / true.grad.norm()) ** 2 for p, true in pairs) ** 0.5


def test_plain_torch_keeps_more_and_a_frozen_layer_one():
    model, plain = nets("relu")
    assert len(Graphs().step(plain).retained) >= 4
    graphs = Graphs().step(model.eval())
    assert len(graphs.retained) == 2
    assert graphs.reductions == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, *in_soak([torch.float16])])
def test_autocast_is_as_exact_as_plain_torch_and_keeps_one_buffer_in_16_bits(dtype):
    graphs, (model, plain), (_, exact) = Graphs(), nets("relu"), nets("relu")
    call = torch.compile(model.float(), fullgraph=True, backend=graphs.backend)
    torch.manual_seed(1)
    ratios = []  # of the errors, which differ by a factor of two from batch to batch
    for x in torch.randn(8, *BATCH):
        for net in (model, plain.float(), exact):
            net.zero_grad()
        for net in (call, plain):
            with torch.autocast("cpu", dtype):
                out = net(x)
            out.float().square().sum().backward()
        exact(x.double()).square().sum().backward()
        ratios.append(float(error(model, exact) / error(plain, exact)))
    assert math.prod(ratios) ** (1 / len(ratios)) <= 1.5
    assert [retained.dtype for retained in graphs.retained] == [dtype] * 3  # the net's input, cast, is one
    assert graphs.reductions == 2


def test_a_join_whose_output_is_kept_does_not_keep_its_residual():
    model, _ = nets("relu", joined=True)
    model.second.rebuild_joins = False
    x = torch.randn(BATCH, dtype=torch.float64)

    def step(x):
        return model.convs[2](model.second(model.convs[1](x), model.convs[0](x)))  # nobody else needs the residual

    graphs = Graphs()
    torch.compile(step, fullgraph=True, backend=graphs.backend)(x).square().sum().backward()
    assert len(graphs.retained) == 2


def save_convolutions(context, op, *args, **kwargs):
    saved = op is torch.ops.aten.convolution.default
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("policy", [save_convolutions, *in_soak([None])])
def test_a_users_checkpoint_decides_and_statistics_move_once(policy):
    model, plain = nets("relu")
    how = {} if policy is None else {"context_fn": partial(create_selective_checkpoint_contexts, policy)}

    def around(x):
        return model.convs[2](checkpoint(second, model.first(model.convs[0](x)), use_reentrant=False, **how))

    def second(x):
        return model.second(model.convs[1](x))

    assert_same_steps(model, plain, torch.compile(around, fullgraph=True, backend="aot_eager"))


@pytest.mark.parametrize(("activation", "strategy"), [("mish", "checkpoint"), *in_soak([("relu", "standard")])])
def test_the_standard_strategy_and_unknown_activations_stay_plain(activation, strategy):
    model, plain = nets(activation, strategy)
    graphs = Graphs()
    assert_same_steps(model, plain, torch.compile(model, fullgraph=True, backend=graphs.backend))
    assert len(graphs.retained) >= 4


@pytest.mark.parametrize("training", [True, False])
def test_export_gives_plain_ops(training):
    model, plain = nets("relu")
    x = torch.randn(BATCH, dtype=torch.float64)
    exported = torch.export.export(model.train(training), (x,))
    assert not any("checkpoint" in str(node.target) for node in exported.graph.nodes)
    torch.testing.assert_close(exported.module()(x), plain.train(training)(x))


def test_statistics_move_without_gradients():
    model, plain = nets("relu")
    x = torch.randn(BATCH, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="aot_eager")(x), plain(x))
    torch.testing.assert_close(model.second.running_var, plain.second.norm.running_var)


def test_a_compiled_part_of_an_eager_model_trains_as_plain_torch_does():
    (part, plain_part), (rest, plain_rest) = nets("relu"), nets("silu")
    model, plain = nn.Sequential(part, rest), nn.Sequential(plain_part, plain_rest)
    call = nn.Sequential(torch.compile(part, fullgraph=True, backend="aot_eager"), rest)
    assert_same_steps(model, plain, call)
    assert counters["stats"]["unique_graphs"] == 1


def test_compiled_calls_see_no_saved_tensor_hooks_of_ours():
    model, _ = nets("relu")
    seen = []

    def backend(graph, inputs):
        def run(*args):
            seen.append(torch._C._autograd._top_saved_tensors_default_hooks(True))
            return graph.forward(*args)

        return run

    compiled = torch.compile(model, fullgraph=True, backend=backend)
    compiled(torch.randn(BATCH, dtype=torch.float64))
    assert seen == [None]


# -- torch.func ----------------------------------------------------------------------------------------


def in_order(gradients):
    return [gradients[name] for name in sorted(gradients)]


def by_grad(net):
    values = {n: p.detach() for n, p in net.named_parameters()}
    buffers = {n: b.clone() for n, b in net.named_buffers()}

    def loss(values, buffers):
        return functional_call(net, (values, buffers), (batch(),)).square().sum()

    return [in_order(grad(loss)(values, buffers)), list(buffers.values())]


def per_sample(net):
    def loss(values, x):
        return functional_call(net, values, (x[None],)).square().sum()

    values = {n: p.detach() for n, p in net.named_parameters()}
    return in_order(vmap(grad(loss), (None, 0))(values, batch()))


def by_functional_call(net):
    values = {n: (p.detach() * 1.5).requires_grad_() for n, p in net.named_parameters()}
    functional_call(net, values, (batch(),)).square().sum().backward()
    return in_order({n: value.grad for n, value in values.items()})


FUNCTIONAL = [
    *((by_grad, strategy, "leaky_relu", {}) for strategy in ONE_BUFFER),
    *((per_sample, strategy, "leaky_relu", {"track_running_stats": False}) for strategy in ONE_BUFFER),
    *((by_functional_call, s, "prelu" if s.startswith("checkpoint") else "leaky_relu", {}) for s in ONE_BUFFER),
]


@pytest.mark.parametrize(("run", "strategy", "activation", "options"), FUNCTIONAL)
def test_torch_func_gives_torchs_gradients(run, strategy, activation, options):
    ours, plain = networks(strategy, activation, **options)
    torch.testing.assert_close(run(ours), run(plain))


# -- traced and exported -------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ONE_BUFFER)
def test_tracing_in_eval_mode_agrees(strategy):
    layer, plain = pair(strategy)
    model = nn.Sequential(nn.Conv2d(4, 4, 1), layer, nn.Conv2d(4, 4, 1)).eval()
    traced = torch.jit.trace(model, torch.randn(2, 4, 5, 5))
    x = torch.randn(3, 4, 6, 6)
    torch.testing.assert_close(traced(x), nn.Sequential(model[0], plain.eval(), model[2])(x))


@pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("onnx", "onnxscript", "onnxruntime")), reason="needs onnx"
)
def test_onnx_in_eval_mode_agrees(tmp_path):
    import onnxruntime

    layer, plain = pair("checkpoint")
    x = torch.randn(2, 4, 5, 5)
    torch.onnx.export(layer.eval(), (x,), str(tmp_path / "layer.onnx"))
    session = onnxruntime.InferenceSession(str(tmp_path / "layer.onnx"))
    (actual,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(actual), plain.eval()(x))
