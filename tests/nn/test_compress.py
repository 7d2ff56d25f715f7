"""``nn.compressed``: what it stores, what it leaves alone, and that the memory is really gone."""

import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from lowtide.errors import LowtideError
from lowtide.kernels.compress import buffer_bytes
from lowtide.nn import compress as module
from lowtide.nn import compressed
from tests.nn.compressing import Saved, activation
from tests.nn.raising import raises
from tests.soak import count, in_soak


def test_the_forward_pass_is_as_without_and_gradients_are_near():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    x = torch.randn(128, 64)
    plain = model(x).square().mean()
    expected = torch.autograd.grad(plain, list(model.parameters()))
    for bits, tolerance in ((8, 0.01), (4, 0.15), (2, 1.0)):
        with compressed(bits):
            loss = model(x).square().mean()
        assert torch.equal(loss, plain)
        for actual, wanted in zip(torch.autograd.grad(loss, list(model.parameters())), expected, strict=True):
            assert float((actual - wanted).norm() / wanted.norm()) < tolerance


def test_the_gradient_of_a_linear_layer_is_right_on_average():
    torch.manual_seed(0)
    layer, x, dy = nn.Linear(16, 4, bias=False), activation(32, 16), torch.randn(32, 4)
    wide = dy.double().T @ x.detach().double()
    draws = []
    for seed in range(count(300, soak=2000)):
        torch.manual_seed(seed)
        with compressed(2):
            y = layer(x)
        draws.append(torch.autograd.grad(y, layer.weight, dy)[0].double())
    many = torch.stack(draws)
    error = (many.mean(0) - wide) / (many.std(0) / len(draws) ** 0.5)
    assert float(error.square().mean().sqrt()) < 1.3  # 1 if unbiased
    assert float(error.abs().max()) < 4.5


def test_the_activation_dies_and_the_codes_stay():
    x = activation(64, 256)
    with compressed(4):
        hidden = F.gelu(x)
        y = hidden.square().sum()
    alive = weakref.ref(hidden.untyped_storage())
    del hidden
    gc.collect()
    assert alive() is None
    y.backward()


def test_a_tensor_that_two_ops_save_is_stored_once_whatever_its_shape():
    x = activation(32, 256)
    with Saved() as saved, compressed(4):
        y = x.view(-1).square().sum() + x.exp().sum() + (x.t() @ x).sum() + x.square().sum()
    assert saved.codes.count((buffer_bytes(32 * 256, 4, 256, x.dtype),)) == 2  # x, and the result of exp
    y.backward()


def test_a_tensor_that_was_written_to_is_stored_anew():
    x = activation(32, 256)
    with compressed(8):
        h = x * 1
        a = h.square().sum()
        h.mul_(3)
        b = h.square().sum()
    (actual,) = torch.autograd.grad(a + b, x)
    expected = 2 * x.detach() + 18 * x.detach()
    assert float((actual - expected).norm() / expected.norm()) < 0.01


def test_no_record_is_left_when_the_graph_is_gone():
    x = activation(32, 256)
    with compressed(4):
        y = x.square().sum()
    assert len(module._records) > 0
    del y
    gc.collect()
    assert len(module._records) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_dtype_shape_and_strides_come_back(dtype):
    seen = []

    class Reader(torch.autograd.Function):
        @staticmethod
        def forward(ctx, tensor):
            ctx.save_for_backward(tensor)
            return tensor.sum()

        @staticmethod
        def backward(ctx, gradient):
            seen.append(ctx.saved_tensors[0])
            return gradient.expand(seen[-1].shape)

    x = activation(4, 6, 10, 12, dtype=dtype)
    views = {
        "channels last": x.to(memory_format=torch.channels_last),
        "transposed": x.transpose(0, 2),
        "expanded": x.unsqueeze(0).expand(3, 4, 6, 10, 12),
        "with gaps": x[:, 1:5],
        "offset": x[1:],
    }
    for name, view in views.items():
        with compressed(8):
            y = Reader.apply(view)
        y.backward(retain_graph=True)
        back = seen.pop().detach()
        assert (back.dtype, back.shape) == (view.dtype, view.shape), name
        assert back.stride() == (view.contiguous().stride() if name == "with gaps" else view.stride()), name
        assert float((back.double() - view.detach().double()).abs().max()) < 0.06, name


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_inside_starts_again_from_what_there_was(reentrant):
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    x = activation(64, 64)

    def run():
        return checkpoint(layer, x, use_reentrant=reentrant).square().sum()

    layer.zero_grad()
    run().backward(retain_graph=True)
    expected = layer[0].weight.grad.clone()
    layer.zero_grad()
    with compressed(2):
        h = checkpoint(layer, x, use_reentrant=reentrant)
    y = h.square().sum()
    y.backward(retain_graph=True)
    assert torch.equal(layer[0].weight.grad, expected)


def test_inside_a_checkpoint_everything_is_exact():
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    x = torch.randn(64, 64)

    def inside(tensor):
        with compressed(2):
            return layer(tensor)

    expected = torch.autograd.grad(layer(x).square().sum(), layer[0].weight)[0]
    y = checkpoint(inside, x, use_reentrant=False).square().sum()
    assert torch.equal(torch.autograd.grad(y, layer[0].weight)[0], expected)


def test_other_hooks_get_the_codes():
    x = activation(64, 256)
    with torch.autograd.graph.save_on_cpu(), compressed(8):
        y = x.square().sum()
    (actual,) = torch.autograd.grad(y, x)
    assert float((actual - 2 * x.detach()).norm() / actual.norm()) < 0.01


def test_of_two_the_inner_one_decides():
    x = activation(32, 256)
    with Saved() as saved, compressed(2), compressed(8):
        x.square()
    assert saved.codes == [(buffer_bytes(32 * 256, 8, 256, x.dtype),)]


def test_a_graph_can_be_gone_through_twice_and_differentiated_twice():
    x = activation(32, 256)
    with compressed(8):
        y = x.pow(3).sum()
    first = torch.autograd.grad(y, x, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(y, x, retain_graph=True)[0], first)
    (once,) = torch.autograd.grad(y, x, create_graph=True)
    (twice,) = torch.autograd.grad(once.sum(), x)
    expected = 6 * x.detach()
    assert float((twice - expected).norm() / expected.norm()) < 0.02


def test_other_seeds_and_other_values_are_rounded_otherwise():
    x = activation(32, 256)

    def noise(x):
        with compressed(8):
            y = x.square().sum()
        return (torch.autograd.grad(y, x)[0] / 2 - x).detach()

    torch.manual_seed(5)
    first = noise(x)
    torch.manual_seed(6)
    assert not torch.equal(noise(x), first)
    torch.manual_seed(5)
    assert torch.equal(noise(x), first)
    nudged = noise(x * (1 + 1e-6))
    assert abs(float(F.cosine_similarity(nudged.flatten(), first.flatten(), 0))) < 0.1  # 1 for the same draws


def test_the_users_random_numbers_are_as_without():
    torch.manual_seed(5)
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 64)), torch.randn(64, 64)
    states = []
    for context in (nullcontext, compressed):
        torch.manual_seed(5)
        with context():
            y = model(x).sum()
        y.backward()
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


def test_without_gradients_nothing_happens_and_wrong_bits_are_refused():
    with torch.no_grad(), compressed(2):
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    with raises(LowtideError, "3"), compressed(3):
        pass


def test_kept_tensors_are_still_guarded_against_writes():
    x = torch.randn(8, requires_grad=True)
    with compressed(4):
        h = x * 1
        y = h.square().sum()
    h.detach().add_(1)
    with raises(RuntimeError, "version", "[8]"):
        y.backward()


def test_an_empty_batch_passes():
    layer = nn.Linear(64, 64)
    with compressed(4):
        layer(activation(0, 64)).sum().backward()
    assert torch.equal(layer.weight.grad, torch.zeros(64, 64))


# -- what is kept as it is -----------------------------------------------------------------------------


def test_what_is_no_activation_is_kept_as_it_is():
    torch.manual_seed(0)
    layer, norm = nn.Linear(64, 64), nn.LayerNorm(64)
    x = torch.randn(512, 64)  # the batch: it is held anyway
    with Saved() as saved, compressed(4):
        h = norm(layer(x))
        h = F.dropout(F.linear(h, layer.weight.t()), 0.5)
        y = F.max_pool1d(h, 2)
    size = (buffer_bytes(512 * 64, 4, 256, x.dtype),)
    assert saved.codes == [size] * 3  # what norm, linear and pooling read; not the batch, weights, masks, places
    y.sum().backward()


def test_under_autocast_the_cast_weights_are_kept():
    torch.manual_seed(0)
    layer = nn.Linear(64, 64)
    x = activation(512, 64)
    with Saved() as saved, compressed(4), torch.autocast("cpu", torch.bfloat16):
        y = layer(x * 2)
    assert (torch.bfloat16, (64, 64)) in saved.seen
    assert saved.codes == [(buffer_bytes(512 * 64, 4, 256, torch.bfloat16),)]
    y.float().sum().backward()
    assert layer.weight.grad.isfinite().all()


WEIGHT_VIEWS = {
    "unfold": lambda w: w.unfold(0, 8, 8),
    "diagonal": lambda w: w.view(8, 8, 64).diagonal(0, 1, 2).expand(64, 8, 8).transpose(0, 2),
    "view_as_real": lambda w: torch.view_as_real(torch.view_as_complex(w.view(64, 32, 2))),
    "as_strided": lambda w: w.as_strided((32, 32), (2, 128)),
    "copy": lambda w: w.unfold(0, 8, 8).contiguous(),
    "cast": lambda w: w.unfold(0, 8, 8).double().transpose(0, 1),
}


@pytest.mark.parametrize("view", WEIGHT_VIEWS.values(), ids=WEIGHT_VIEWS)
def test_every_view_of_a_parameter_is_kept(view):
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(64, 64))
    x = torch.randn(view(weight).shape, requires_grad=True)
    with compressed(2):
        y = x * view(weight)
    (actual,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(actual, view(weight).detach().to(x.dtype))


@pytest.mark.parametrize("view", WEIGHT_VIEWS.values(), ids=WEIGHT_VIEWS)
def test_every_view_of_an_activation_is_stored(view):
    hidden = activation(64, 64)
    with Saved() as saved, compressed(2):
        y = view(hidden).square()
    assert len(saved.codes) == 1
    y.sum().backward()


@pytest.mark.parametrize("bits", [2, *in_soak([8])])
@pytest.mark.parametrize("how", ["fused", "masked", "packed", "math"])
@pytest.mark.parametrize(("scale", "copies"), [(1.0, False), (3.0, False), (2.0, True)])
def test_attention_stays_within_the_bound_however_sharp_it_is(bits, how, scale, copies):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 128, 64, requires_grad=True) for _ in range(3))
    if copies:  # each row attends to itself alone
        k = q
    inputs = list(dict.fromkeys((q, k, v)))
    weight = torch.randn(2, 4, 128, 64)

    def run():
        a, b, c = q * scale, k * scale, v * 1
        if how == "packed":  # as one linear layer makes them
            a, b, c = torch.stack((a, b, c)).unbind()
        mask = torch.zeros(128, 128) if how == "masked" else None
        backend = SDPBackend.MATH if how == "math" else SDPBackend.FLASH_ATTENTION
        with sdpa_kernel(backend):
            return (F.scaled_dot_product_attention(a, b, c, mask) * weight).sum()

    expected = torch.autograd.grad(run(), inputs)
    with compressed(bits, seed=0):
        loss = run()
    for actual, wanted in zip(torch.autograd.grad(loss, inputs), expected, strict=True):
        if how == "math":  # what softmax reads is not exponentiated again, and the rest is linear
            assert float((actual - wanted).norm() / wanted.norm()) < 12 / (2**bits - 2)
        else:
            assert torch.equal(actual, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_every_fused_attention_of_a_gpu_has_torchs_gradients(backend, dropout):
    torch.manual_seed(0)
    inputs = [torch.randn(2, 4, 128, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]

    def run():
        torch.manual_seed(1)
        with sdpa_kernel(getattr(SDPBackend, backend)):
            return F.scaled_dot_product_attention(*(x * 3 for x in inputs), dropout_p=dropout).float().sum()

    expected = torch.autograd.grad(run(), inputs)
    with compressed(2):
        loss = run()
    for actual, wanted in zip(torch.autograd.grad(loss, inputs), expected, strict=True):
        torch.testing.assert_close(actual, wanted)  # efficient attention adds up in any order


def test_what_attention_reads_is_stored_for_others_but_kept_for_it():
    h = activation(2, 4, 128, 64)
    with compressed(2):
        other = h.square().sum()
        y = F.scaled_dot_product_attention(h * 1, h, h).sum()
    exact = torch.autograd.grad(F.scaled_dot_product_attention(h * 1, h, h).sum(), h, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(y, h, retain_graph=True)[0], exact)
    assert not torch.equal(torch.autograd.grad(other, h)[0], 2 * h)


@pytest.mark.parametrize("library", ["FlashAttnFunc", "_fMHA", "FlexAttentionAutogradOp"])
def test_attention_of_other_libraries_is_kept(library):
    seen = []

    def forward(ctx, a, b):
        out = a * b
        ctx.save_for_backward(a, b, out)
        return out

    def backward(ctx, gradient):
        seen.extend(ctx.saved_tensors)
        return gradient, gradient

    function = type(
        library, (torch.autograd.Function,), {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    )
    a, b = activation(32, 256), activation(32, 256) * 2
    with compressed(2):
        out = function.apply(a, b)
    out.sum().backward()
    assert all(map(torch.equal, seen, (a, b, out)))
    with compressed(2):  # its node is not asked again
        out.square()


@pytest.mark.parametrize(
    "run",
    [
        lambda x: torch.logsumexp(20 * x, -1),
        lambda x: torch.logcumsumexp(20 * x, -1),
        lambda x: torch.special.log_ndtr(5 * x),
        lambda x: torch.sqrt(x - x.detach().min() + 1e-6),
        lambda x: F.cross_entropy(20 * x, torch.arange(64), reduction="none"),
        lambda x: F.ctc_loss(20 * x.view(64, 4, 64), torch.arange(1, 9).expand(4, 8), [64] * 4, [8] * 4),
    ],
    ids=["logsumexp", "logcumsumexp", "log_ndtr", "sqrt", "cross_entropy", "ctc_loss"],
)
def test_what_backward_exponentiates_or_divides_by_is_kept(run):
    x = activation(64, 256).detach().requires_grad_()
    (expected,) = torch.autograd.grad(run(x).sum(), x)
    with compressed(4):
        y = run(x)
    (actual,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(actual, expected)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler's own
def test_what_a_compiled_region_saves_is_kept():
    x = activation(64, 256).detach().requires_grad_()
    run = torch.compile(torch.logsumexp, backend="aot_eager")
    (expected,) = torch.autograd.grad(torch.logsumexp(x * 20, -1).sum(), x)
    with compressed(2):
        y = run(x * 20, -1)
    (actual,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(actual, expected)


def test_softmax_is_kept_unless_asked_for():
    x = activation(32, 256)
    for run in (torch.softmax, torch.log_softmax):
        with Saved() as saved, compressed(4):
            run(x, -1)
        assert not saved.codes
        with Saved() as saved, compressed(4, keep=lambda tensor: False):
            y = run(x, -1)
        torch.autograd.grad(y.sum(), x)
        assert len(saved.codes) == 1
