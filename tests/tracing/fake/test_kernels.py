"""Fake traces agree with real ones op by op; each correction of a fake kernel is right, and needed."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from lowtide import Workload
from lowtide.errors import TraceError
from lowtide.tracing import trace
from lowtide.tracing.fake.gpu import GPU_SUBSTITUTES
from lowtide.tracing.fake.kernel_dispatch import FakeKernels
from lowtide.tracing.fake.kernels import FIXES, SUBSTITUTES, lstm_workspace_bytes
from tests.soak import count, in_soak
from tests.tracing import layers
from tests.tracing.comparing import assert_fake_is_real
from tests.tracing.layers import FLOAT32, Of, integers, loss, mask

aten = torch.ops.aten
STEPS = layers.steps(*layers.GROUPS)
MIXED = {name for name in STEPS if name.endswith("mixed")}  # float32 norms in a bfloat16 model
IN_BFLOAT16 = layers.steps(layers.norms, layers.activations, layers.embeddings, layers.losses).keys() - FLOAT32
UNDER_AUTOCAST = layers.steps(layers.norms, layers.recurrent, layers.attention).keys() - MIXED


def some(names):
    """Every fourth, and all of them under ``make soak``. The fixes themselves are all tested below."""
    names = sorted(names)
    return names[::4] + in_soak(names)


ONEDNN_BFLOAT16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()


def work_of(name, *, dtype=torch.float32, autocast=None):
    make, batch = STEPS[name]
    torch.manual_seed(0)
    batch = [t.to(dtype) if t.is_floating_point() else t for t in batch]
    return Workload(make().to(dtype), loss, batch, autocast=autocast)


@pytest.mark.filterwarnings("ignore")  # of torch, about kernels that it does not take
@pytest.mark.parametrize("name", some(STEPS.keys() - MIXED))
def test_a_fake_step_is_the_real_one_op_by_op(name):
    assert_fake_is_real(work_of(name))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", some(IN_BFLOAT16))
def test_a_fake_step_in_bfloat16_is_the_real_one_op_by_op(name):
    assert_fake_is_real(work_of(name, dtype=torch.bfloat16))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", some(UNDER_AUTOCAST))
def test_a_fake_step_under_autocast_is_the_real_one_op_by_op(name):
    if name.startswith("LSTM") and not ONEDNN_BFLOAT16:
        pytest.skip("this CPU runs no LSTM under autocast")
    assert_fake_is_real(work_of(name, autocast=torch.bfloat16))


# -- what cannot be faked ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "batch"),
    [
        (lambda x: x * x.sum().item(), ()),
        (lambda x: x if x.sum() > 0 else -x, ()),
        (lambda x, m: x[m], (mask(3, 4),)),
        (lambda x: x[x.nonzero()[:, 0]], ()),
        (lambda x: torch.sparse.mm(x.to_sparse(), x.T), ()),
        (lambda x, i: sum(nn.functional.embedding(i + k, x, sparse=True) for k in (0, 1)), (integers(2, below=2),)),
        (lambda x: nn.LSTM(4, 2)(nn.utils.rnn.pack_sequence([x, x[:2]]))[0].data, ()),
        (lambda x: nn.functional.ctc_loss(x.view(3, 1, 4).log_softmax(2), torch.tensor([[1, 2]]), (3,), (2,)), ()),
    ],
    ids=["item", "branch", "mask", "nonzero", "to_sparse", "sparse sum", "packed sequence", "ctc_loss"],
)
def test_a_step_that_cannot_be_faked_says_so(function, batch):
    work = Workload(Of(function, (3, 4)), loss, batch)
    trace(work)
    with pytest.raises(TraceError) as error:
        trace(work, fake=True)
    assert "fake=True" in str(error.value)


def test_an_op_that_fails_on_fake_tensors_alone_is_a_trace_error():
    def no_fakes(x):
        if isinstance(x.data, torch._subclasses.FakeTensor):
            raise RuntimeError("no kernel for fake tensors")
        return x

    work = Workload(Of(no_fakes, (3, 4)), loss, ())
    with pytest.raises(TraceError) as error:
        trace(work, fake=True)
    assert "no kernel for fake tensors" in str(error.value)  # the op's own words
    assert "fake=True" in str(error.value)


# -- each fix ------------------------------------------------------------------------------------------


def rows(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype)


def columns(*shape, dtype=torch.float32):
    """The same, laid out the other way: transposed, or channels-last."""
    if len(shape) > 3:
        formats = {4: torch.channels_last, 5: torch.channels_last_3d}
        return rows(*shape, dtype=dtype).contiguous(memory_format=formats[len(shape)])
    return rows(*reversed(shape), dtype=dtype).permute(*range(len(shape) - 1, -1, -1))


def broadcast(*shape, dtype=torch.bfloat16):
    return torch.ones((), dtype=dtype).expand(shape)


def lstm(steps=4, batch=3, wide=5, hidden=6, *, dtype=torch.float32, reverse=False):
    shapes = ((steps, batch, wide), (4 * hidden, wide), (4 * hidden, hidden), (4 * hidden,), (4 * hidden,))
    tensors = [torch.zeros(shape, dtype=dtype) for shape in (*shapes, (batch, hidden), (batch, hidden))]
    out = aten.mkldnn_rnn_layer(*tensors, reverse, [], 2, hidden, 1, True, False, False, True)
    return tensors, out


def lstm_backward(dtype=torch.float32, biases=True):
    tensors, (output, hy, cy, workspace) = lstm(dtype=dtype)
    tensors[3:5] = tensors[3:5] if biases else tensors[1:3]
    gradients = torch.ones_like(output), None, None
    options = False, 2, 6, 1, biases, True, False, [], False
    return aten.mkldnn_rnn_layer_backward(*tensors, output, hy, cy, *gradients, *options, workspace)


def bag(op, dtype=torch.float32, mode=0, include_last_offset=False):
    weight, indices, offsets = rows(9, 5, dtype=dtype), torch.zeros(7, dtype=torch.long), torch.tensor([0, 3, 7])
    offsets = offsets if include_last_offset else offsets[:2].clone()
    return op(weight, indices, offsets, False, mode, False, None, include_last_offset)


def bag_backward():
    indices, offsets = torch.zeros(7, dtype=torch.long), torch.zeros(2, dtype=torch.long)
    record = torch.zeros(0, dtype=torch.long), offsets, offsets
    return aten._embedding_bag_backward(rows(2, 5), indices, offsets, *record, 9, False, 0, True, None)


def sparse_clone():
    indices = torch.zeros(1, 3, dtype=torch.long)
    return torch.sparse_coo_tensor(indices, rows(3, 5), (9, 5), check_invariants=False).clone()


def group_norm_backward(x, grad):
    statistics = torch.ones(2, 2), torch.ones(2, 2)
    return aten.native_group_norm_backward(grad, x, *statistics, rows(4), 2, 4, 15, 2, [True, True, True])


def batch_norm_backward(x, grad):
    statistics = rows(4), rows(4), rows(4), rows(4)
    return aten.native_batch_norm_backward(grad, x, rows(4), *statistics, True, 1e-5, [True, True, True])


def layer_norm_backward(x, grad):
    statistics = torch.ones(3, 4, 1), torch.ones(3, 4, 1)
    return aten.native_layer_norm_backward(grad, x, [6], *statistics, rows(6), rows(6), [True, True, True])


def pair(op, *between):
    """A backward op of a gradient and of an input with the other layout; or with a broadcast gradient."""
    return (
        lambda: op(rows(4, 6), *between, columns(4, 6)),
        lambda: op(broadcast(4, 6), *between, columns(4, 6, dtype=torch.bfloat16)),
    )


LOW = {"dtype": torch.bfloat16}
IMAGE, VOLUME = (2, 4, 5, 3), (2, 4, 5, 3, 2)

# One call at least that the fake kernel answers wrongly.
CALLS = {
    aten.mkldnn_rnn_layer.default: [lambda: lstm()[1], lambda: torch.no_grad()(lstm)()[1]],
    aten.mkldnn_rnn_layer_backward.default: [
        lstm_backward,
        partial(lstm_backward, biases=False),
        *([partial(lstm_backward, torch.bfloat16)] if ONEDNN_BFLOAT16 else []),
    ],
    aten._embedding_bag.default: [
        lambda: bag(aten._embedding_bag, mode=1),
        lambda: bag(aten._embedding_bag, dtype=torch.bfloat16),
        lambda: bag(aten._embedding_bag, include_last_offset=True),
    ],
    aten._embedding_bag_forward_only.default: [
        lambda: bag(aten._embedding_bag_forward_only, mode=1),
        lambda: bag(aten._embedding_bag_forward_only, include_last_offset=True),
        lambda: bag(aten._embedding_bag_forward_only, mode=2, include_last_offset=True),
    ],
    aten._embedding_bag_backward.default: [bag_backward],
    aten.clone.default: [sparse_clone],
    aten.im2col.default: [lambda: aten.im2col(rows(2, 3, 6, 6), [1, 1], [1, 1], [0, 0], [3, 3])],
    aten.col2im.default: [lambda: aten.col2im(rows(2, 27, 16), [6, 6], [3, 3], [1, 1], [0, 0], [1, 1])],
    aten.mse_loss.default: [lambda: aten.mse_loss(rows(3, 5), rows(3, 1))],
    aten.smooth_l1_loss.default: [lambda: aten.smooth_l1_loss(rows(3, 5), rows(3, 5))],
    aten.soft_margin_loss.default: [lambda: aten.soft_margin_loss(rows(3, 5), rows(3, 5))],
    aten.binary_cross_entropy.default: [
        lambda: aten.binary_cross_entropy(rows(3, 5), rows(3, 5)),
        lambda: aten.binary_cross_entropy(columns(3, 5), rows(3, 5), None, 0),
    ],
    aten.binary_cross_entropy_backward.default: [
        lambda: aten.binary_cross_entropy_backward(rows(3, 5), columns(3, 5), rows(3, 5), None, 0)
    ],
    aten.mse_loss_backward.default: [lambda: aten.mse_loss_backward(rows(), columns(*IMAGE), rows(*IMAGE), 1)],
    aten.smooth_l1_loss_backward.default: [
        lambda: aten.smooth_l1_loss_backward(rows(), columns(*IMAGE), columns(*IMAGE), 1, 1.0)
    ],
    aten.huber_loss_backward.default: [
        lambda: aten.huber_loss_backward(rows(), columns(*IMAGE), columns(*IMAGE), 1, 1.0)
    ],
    aten.nll_loss2d_forward.default: [
        lambda: aten.nll_loss2d_forward(rows(*IMAGE), rows(2, 3, 5, dtype=torch.int64).transpose(1, 2), None, 0, -100)
    ],
    aten._log_softmax_backward_data.default: [
        lambda: aten._log_softmax_backward_data(columns(*IMAGE), rows(*IMAGE), 1, torch.float32)
    ],
    aten.native_batch_norm.default: [
        lambda: aten.native_batch_norm(rows(2, 4, 3, **LOW), rows(4), rows(4), None, None, True, 0.1, 1e-5),
        lambda: aten.native_batch_norm(rows(2, 4, 3, **LOW), None, None, rows(4), rows(4), True, 0.1, 1e-5),
        lambda: aten.native_batch_norm(columns(2, 4, 3), rows(4), rows(4), None, None, True, 0.1, 1e-5),
    ],
    aten._native_batch_norm_legit_functional.default: [
        lambda: aten._native_batch_norm_legit_functional(
            columns(2, 4, 3), rows(4), rows(4), rows(4), rows(4), True, 0.1, 1e-5
        ),
    ],
    aten._native_batch_norm_legit.no_stats: [
        lambda: aten._native_batch_norm_legit(rows(2, 4, 3, **LOW), rows(4), rows(4), True, 0.1, 1e-5),
        lambda: aten._native_batch_norm_legit(columns(2, 4, 3), rows(4), rows(4), True, 0.1, 1e-5),
    ],
    aten.native_layer_norm.default: [lambda: aten.native_layer_norm(rows(3, 4, 6, **LOW), [6], rows(6), rows(6), 1e-5)],
    aten.native_group_norm.default: [
        lambda: aten.native_group_norm(rows(2, 4, 5, 3, **LOW), rows(4), rows(4), 2, 4, 15, 2, 1e-5)
    ],
    aten.native_batch_norm_backward.default: [lambda: batch_norm_backward(rows(*IMAGE), columns(*IMAGE))],
    aten.native_group_norm_backward.default: [
        lambda: group_norm_backward(rows(*IMAGE, **LOW), rows(*IMAGE, **LOW)),
        lambda: group_norm_backward(columns(*IMAGE), rows(*IMAGE)),
    ],
    aten.native_layer_norm_backward.default: [lambda: layer_norm_backward(rows(3, 4, 6), columns(3, 4, 6))],
    aten.glu_backward.default: [lambda: aten.glu_backward(rows(2, 2, 5, 3), columns(*IMAGE), 1)],
    aten.log_sigmoid_forward.default: [lambda: aten.log_sigmoid_forward(columns(4, 6))],
    aten.log_sigmoid_backward.default: [
        lambda: aten.log_sigmoid_backward(broadcast(4, 6, dtype=torch.float32), columns(4, 6), columns(4, 6))
    ],
    aten.rrelu_with_noise.default: [lambda: aten.rrelu_with_noise(columns(4, 6), rows(4, 6))],
    aten.rrelu_with_noise_backward.default: [
        lambda: aten.rrelu_with_noise_backward(rows(4, 6), columns(4, 6), columns(4, 6), 0.1, 0.3, True, False)
    ],
    aten.elu_backward.default: pair(aten.elu_backward, 1.0, 1.0, 1.0, False),
    aten.hardtanh_backward.default: [lambda: aten.hardtanh_backward(rows(4, 6), columns(4, 6), -1, 1)],
    aten.softplus_backward.default: [lambda: aten.softplus_backward(rows(4, 6), columns(4, 6), 1, 20)],
    aten.native_dropout_backward.default: [
        lambda: aten.native_dropout_backward(columns(4, 6), columns(4, 6, dtype=torch.bool), 2.0)
    ],
    aten.gelu_backward.default: pair(aten.gelu_backward),
    aten.hardsigmoid_backward.default: pair(aten.hardsigmoid_backward),
    aten.hardswish_backward.default: pair(aten.hardswish_backward),
    aten.logit_backward.default: pair(aten.logit_backward),
    aten.mish_backward.default: pair(aten.mish_backward),
    aten.sigmoid_backward.default: pair(aten.sigmoid_backward),
    aten.silu_backward.default: pair(aten.silu_backward),
    aten.tanh_backward.default: pair(aten.tanh_backward),
    aten.add.Tensor: pair(aten.add),
    aten.sub.Tensor: pair(aten.sub),
    aten.mul.Tensor: (*pair(aten.mul), lambda: aten.mul(broadcast(4, 6), columns(4, 6))),
    aten.div.Tensor: pair(aten.div),
    aten.div.Tensor_mode: [lambda: aten.div(rows(4, 6), columns(4, 6), rounding_mode="floor")],
    aten.copysign.Tensor: pair(aten.copysign),
    aten.xlogy.Tensor: pair(aten.xlogy),
    aten.pow.Scalar: [lambda: aten.pow(2.0, columns(4, 6))],
    aten.normal.Tensor_Tensor: [lambda: aten.normal(columns(4, 6), columns(4, 6))],
    aten.reflection_pad2d_backward.default: [
        lambda: aten.reflection_pad2d_backward(rows(2, 4, 7, 5), columns(*IMAGE), [1] * 4)
    ],
    aten.replication_pad2d_backward.default: [
        lambda: aten.replication_pad2d_backward(rows(2, 4, 7, 5), columns(*IMAGE), [1] * 4)
    ],
    aten.reflection_pad3d.default: [lambda: aten.reflection_pad3d(columns(*VOLUME), [1] * 6)],
    aten.replication_pad3d.default: [lambda: aten.replication_pad3d(columns(*VOLUME), [1] * 6)],
    aten.reflection_pad3d_backward.default: [
        lambda: aten.reflection_pad3d_backward(rows(2, 4, 7, 5, 4), columns(*VOLUME), [1] * 6)
    ],
    aten.replication_pad3d_backward.default: [
        lambda: aten.replication_pad3d_backward(rows(2, 4, 7, 5, 4), columns(*VOLUME), [1] * 6)
    ],
    aten.max_unpool2d.default: [
        lambda: aten.max_unpool2d(columns(2, 4, 2, 2), torch.zeros(2, 4, 2, 2, dtype=torch.long), [4, 4])
    ],
    aten.channel_shuffle.default: [lambda: aten.channel_shuffle(columns(*IMAGE), 2)],
    aten.copy.default: [lambda: aten.copy(rows(4, 6)[:, :3], rows(4, 3))],
    aten.slice_scatter.default: [lambda: aten.slice_scatter(rows(4, 6)[:, 1:4], rows(4, 2), 1, 0, 2)],
    aten.select_scatter.default: [lambda: aten.select_scatter(rows(4, 6)[:, 1:4], rows(4), 1, 0)],
    aten.diagonal_scatter.default: [lambda: aten.diagonal_scatter(rows(6, 6)[:4, :4], rows(4))],
    aten.as_strided_scatter.default: [lambda: aten.as_strided_scatter(rows(4, 6)[:, :3], rows(2), (2,), (6,))],
    **{op: [partial(op, 16), partial(op, 1)] for op in FIXES if str(op).endswith("window.default")},
    **{op: [partial(op, 16, True), partial(op, 16, False)] for op in FIXES if str(op).endswith("window.periodic")},
}
if torch.__version__ < "2.13":
    CALLS |= {
        aten._fft_r2c.default: [
            lambda x=x, dims=dims: aten._fft_r2c(x(4, 3, 5), dims, 0, True)
            for x in (rows, columns)
            for dims in ([0], [1, 2], [2, 0], [1, 0, 2], [0, 1], [0, 1, 2])
        ],
        aten.reflection_pad2d.default: [lambda: aten.reflection_pad2d(columns(*IMAGE), [1] * 4)],
        aten.replication_pad2d.default: [lambda: aten.replication_pad2d(columns(*IMAGE), [1] * 4)],
    }


def described(out):
    """Types, layouts and bytes of what an op returned, and which of it is one storage."""
    tensors: list[Tensor | None] = []
    for part in pytree.tree_leaves(out):
        sparse = isinstance(part, Tensor) and part.layout is torch.sparse_coo
        tensors += [part._indices(), part._values()] if sparse else [part]
    storages = [None if t is None else t.untyped_storage() for t in tensors]
    numbers = {s._cdata: number for number, s in enumerate(storages) if s is not None}
    return [
        None if t is None or s is None else (t.dtype, t.shape, t.stride(), s.nbytes(), numbers[s._cdata])
        for t, s in zip(tensors, storages, strict=True)
    ]


@pytest.mark.parametrize("op", FIXES, ids=str)
def test_every_fix_gives_what_the_real_op_gives_and_is_needed(op):
    FakeTensorMode.cache_clear()  # it remembers shapes, and forgets which outputs were one tensor, and in what storage
    wrong = 0
    for call in CALLS[op]:
        real = described(call())
        for _ in range(2):
            with FakeTensorMode():
                wrong += described(call()) != real
        with FakeTensorMode(), FakeKernels({}, {op: FIXES[op]}):
            assert described(call()) == real
    assert wrong


@pytest.mark.gpu
@pytest.mark.parametrize("op", FIXES, ids=str)
def test_every_fix_gives_what_the_real_op_gives_on_a_gpu(op):
    if "mkldnn" in str(op):
        pytest.skip("not on a GPU")
    refused: list[str] = []
    for call in CALLS[op]:
        with torch.device("cuda"):
            try:
                real = described(call())
            except RuntimeError as error:
                refused.append(str(error).splitlines()[0])
                continue
            with FakeTensorMode(), FakeKernels({**SUBSTITUTES, **GPU_SUBSTITUTES}, {op: FIXES[op]}):
                assert described(call()) == real
    if len(refused) == len(CALLS[op]):
        pytest.skip(f"not on a GPU: {'; '.join(refused)}")


def test_every_fix_is_tested():
    assert CALLS.keys() == FIXES.keys()


def update_stats(x, running=None):
    held = (None, None) if running is None else (torch.zeros(4, dtype=running), torch.ones(4, dtype=running))
    return aten.batch_norm_update_stats(x, *held, 0.1)


# Calls that the fake kernel fails at, or would if torch did not run the real one on zeros instead.
FAILING_CALLS = {
    aten.batch_norm_update_stats.default: [
        lambda: update_stats(rows(*IMAGE), torch.float32),
        lambda: update_stats(columns(*VOLUME)),
        lambda: update_stats(rows(*IMAGE, **LOW), torch.float32),
        lambda: update_stats(rows(*IMAGE, **LOW), torch.bfloat16),
        lambda: update_stats(rows(*IMAGE, **LOW)),
        lambda: update_stats(rows(5, 4, dtype=torch.float64), torch.float64),
    ],
    aten.native_group_norm_backward.default: [lambda: group_norm_backward(rows(*IMAGE), rows(2, 4, 3, 5).mT)],
}


@pytest.mark.parametrize("op", SUBSTITUTES, ids=str)
def test_every_substitute_gives_what_the_real_op_gives_and_is_needed(op):
    for call in FAILING_CALLS[op]:
        real = described(call())
        with FakeTensorMode(allow_fallback_kernels=False), pytest.raises((RuntimeError, ValueError)):
            call()
        with FakeTensorMode(allow_fallback_kernels=False), FakeKernels({op: SUBSTITUTES[op]}, FIXES):
            assert described(call()) == real


def test_every_substitute_is_tested():
    assert FAILING_CALLS.keys() == SUBSTITUTES.keys()


@settings(max_examples=count(30, soak=200), deadline=None)
@given(
    steps=st.integers(1, 40),
    batch=st.integers(1, 20) | st.just(130),
    wide=st.integers(1, 300) | st.sampled_from([16, 32, 256, 512]),
    hidden=st.integers(1, 150) | st.sampled_from([16, 32, 64, 256]),
    reverse=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16] if ONEDNN_BFLOAT16 else [torch.float32]),
)
def test_the_workspace_of_an_lstm_is_exact(steps, batch, wide, hidden, reverse, dtype):
    _, (_, _, _, workspace) = lstm(steps, batch, wide, hidden, reverse=reverse, dtype=dtype)
    item = dtype.itemsize
    assert workspace.nbytes == lstm_workspace_bytes(steps, batch, wide, hidden, itemsize=item, cell_itemsize=item)
