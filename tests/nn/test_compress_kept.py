"""``nn.compressed``: what it keeps as it is, and that gradients through it are then exact or within the bound."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lowtide.kernels.compress import buffer_bytes
from lowtide.nn import compressed
from tests.nn.compressing import Saved, activation


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
    (found,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(found, view(weight).detach().to(x.dtype))


@pytest.mark.parametrize("view", WEIGHT_VIEWS.values(), ids=WEIGHT_VIEWS)
def test_every_view_of_an_activation_is_stored(view):
    hidden = activation(64, 64)
    with Saved() as saved, compressed(2):
        y = view(hidden).square()
    assert len(saved.codes) == 1
    y.sum().backward()


@pytest.mark.parametrize("bits", [2, 8])
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
    for found, wanted in zip(torch.autograd.grad(loss, inputs), expected, strict=True):
        if how == "math":  # what softmax reads is not exponentiated again, and the rest is linear
            assert float((found - wanted).norm() / wanted.norm()) < 12 / (2**bits - 2)
        else:
            assert torch.equal(found, wanted)


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
    for found, wanted in zip(torch.autograd.grad(loss, inputs), expected, strict=True):
        torch.testing.assert_close(found, wanted)  # efficient attention adds up in any order


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
    (found,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(found, expected)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler's own
def test_what_a_compiled_region_saves_is_kept():
    x = activation(64, 256).detach().requires_grad_()
    run = torch.compile(torch.logsumexp, backend="aot_eager")
    (expected,) = torch.autograd.grad(torch.logsumexp(x * 20, -1).sum(), x)
    with compressed(2):
        y = run(x * 20, -1)
    (found,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(found, expected)


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
