"""Chunked loss in models that know nothing of it: found, replaced, priced, and taken back."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from lowtide import Workload, profile, zoo
from lowtide.errors import LowtideError, PlanError
from lowtide.nn.lazy_logits import LazyLogits
from lowtide.planning.prediction import apply_options, estimate_peak, predict
from lowtide.techniques import replace_forward, techniques
from lowtide.techniques.chunked_loss import ChunkedLoss, chunk_loss
from lowtide.techniques.segments import RecomputedBlock
from tests.refusals import refused

VOCAB = 211
ids = torch.randint(VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, 16)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, VOCAB, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids):
        return self.head(self.norm(self.tokens(ids)))


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z):
        return z * 2

    @staticmethod
    def backward(ctx, g):
        return g * 2


def transformers_style(z):
    """The ops of transformers' ForCausalLMLoss."""
    z = z[:, slice(0, None), :].float()
    labels = F.pad(ids, (0, 1), value=-100)[..., 1:].contiguous()
    z = z.view(-1, VOCAB)
    return F.cross_entropy(z, labels.view(-1).to(z.device), ignore_index=-100, reduction="mean")


CHUNKED = {
    "flatten": lambda z: F.cross_entropy(z.flatten(0, 1), ids.flatten()),
    "view": lambda z: F.cross_entropy(z.view(-1, z.size(-1)), ids.view(-1)),
    "shifted": lambda z: F.cross_entropy(z[..., :-1, :].contiguous().view(-1, VOCAB), ids[..., 1:].reshape(-1)),
    "transformers": transformers_style,
    "transpose": lambda z: F.cross_entropy(z.transpose(1, 2), ids),
    "permute": lambda z: F.cross_entropy(z.permute(0, 2, 1), ids, reduction="none").mean(),
    "mask": lambda z: F.cross_entropy(z[ids > 50], ids[ids > 50]),
    "module": lambda z: nn.CrossEntropyLoss(label_smoothing=0.1)(z.reshape(18, VOCAB), ids.reshape(18)),
    "one token": lambda z: F.cross_entropy(z[:, -1], ids[:, -1]),
    "to": lambda z: F.cross_entropy(z.to(torch.float32).to(ids.device)[0], ids[0]),
}
WHOLE = {
    "temperature": lambda z: F.cross_entropy((z / 2).flatten(0, 1), ids.flatten()),
    "in place": lambda z: (z.view(-1, VOCAB).mul_(3), F.cross_entropy(z.flatten(0, 1), ids.flatten()))[1],
    "written to": lambda z: (z.__setitem__((..., 3), -5.0), F.cross_entropy(z.flatten(0, 1), ids.flatten()))[1],
    "z-loss": lambda z: F.cross_entropy(z.flatten(0, 1), ids.flatten()) + z.logsumexp(-1).square().mean(),
    "log-softmax": lambda z: F.nll_loss(F.log_softmax(z, -1).flatten(0, 1), ids.flatten()),
    "custom function": lambda z: Double.apply(z).square().mean(),
    "probabilities": lambda z: F.cross_entropy(z.flatten(0, 1), torch.full((18, VOCAB), 1 / VOCAB)),
    "some classes": lambda z: F.cross_entropy(z[..., :200].flatten(0, 1), ids.flatten() % 200),
    "classes as rows": lambda z: F.cross_entropy(z.reshape(VOCAB, 18), ids.flatten().repeat(12)[:VOCAB] % 18),
    "checkpoint": lambda z: checkpoint(lambda z: z.square().mean(), z, use_reentrant=False),
}


def gradients(model, use, autocast=False):
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        logits = model(ids)
        loss = use(logits)
    assert type(loss) is torch.Tensor
    chunked = isinstance(logits, LazyLogits) and logits.lazy.source.whole is None
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))], chunked


def model():
    torch.manual_seed(0)
    return Model()


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", [*CHUNKED, *WHOLE])
def test_any_use_of_the_logits_gives_what_the_plain_model_gives(name, autocast):
    net, use = model(), {**CHUNKED, **WHOLE}[name]
    expected, _ = gradients(net, use, autocast)
    with chunk_loss(net.head, 4):
        actual, chunked = gradients(net, use, autocast)
    assert chunked == (name in CHUNKED)
    for mine, value in zip(actual, expected, strict=True):
        assert mine.dtype == value.dtype
        if autocast:  # both round gradients of logits to bf16, before and after they are divided by the count
            assert (mine - value).norm() <= 1e-2 * value.norm()
        else:
            torch.testing.assert_close(mine, value)


def copied_then_zeroed(z):
    kept = z.float()
    z.mul_(0)
    return kept.flatten(0, 1)


def view_of_a_copy(z):
    kept = z.float()
    some = kept[:, 1:]
    z.mul_(0)
    kept.mul_(3)
    return some.flatten(0, 1)


def gathered_then_zeroed(z):
    kept = z[ids > 50]
    z.data.mul_(0)
    return kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("use", [copied_then_zeroed, view_of_a_copy, gathered_then_zeroed])
def test_copies_and_views_follow_writes_as_in_torch(use, dtype):
    net = model().to(dtype)

    def actual():
        rows = use(net(ids))
        loss = F.cross_entropy(rows, ids.flatten()[: len(rows)])
        return [rows.detach(), loss.detach(), *torch.autograd.grad(loss, list(net.parameters()))]

    expected = actual()
    with chunk_loss(net.head, 4):
        for mine, value in zip(actual(), expected, strict=True):
            assert torch.equal(mine, value)


def test_logits_look_like_logits_without_being_there():
    net = model()
    with chunk_loss(net.head):
        z = net(ids)
        assert isinstance(z, torch.Tensor)
        assert (z.shape, z.dtype, z.device, z.dim(), len(z)) == ((2, 9, VOCAB), torch.float32, ids.device, 3, 2)
        assert z.requires_grad
        assert z.lazy.source.whole is None
        copied = copy.deepcopy(z.detach())
    assert torch.equal(copied, net(ids))
    assert torch.equal(z.argmax(-1), net(ids).argmax(-1))


def test_a_compiled_loss_and_a_compiled_model_are_right():
    torch._dynamo.reset()
    net = model()
    expected, _ = gradients(net, CHUNKED["flatten"])
    with chunk_loss(net.head):
        actual, _ = gradients(torch.compile(net, backend="eager"), CHUNKED["flatten"])
    torch.testing.assert_close(actual, expected)


def test_what_is_taken_of_logits_under_no_grad_has_no_gradient():
    net = model().bfloat16()
    with chunk_loss(net.head):
        z = net(ids)
        with torch.no_grad():
            kept = z.float()
        losses = [F.cross_entropy(rows.flatten(0, 1), ids.flatten()) for rows in (kept, z.float())]
        assert z.lazy.source.whole is None
        assert [loss.requires_grad for loss in losses] == [False, True]
        assert torch.equal(*(loss.detach() for loss in losses))
        assert not (kept + 0).requires_grad
        assert (z + 0).requires_grad


def test_applying_it_twice_or_to_what_is_no_plain_linear_is_refused():
    net = model()
    with chunk_loss(net.head), pytest.raises(LowtideError) as twice:
        chunk_loss(net.head)
    assert "ChunkedHead" in str(twice.value)
    assert "forward" not in net.head.__dict__
    with replace_forward(RecomputedBlock(net.head)), pytest.raises(LowtideError) as taken:
        chunk_loss(net.head)
    assert "RecomputedBlock" in str(taken.value)
    with refused("LayerNorm", "nn.Linear", kind=PlanError):
        chunk_loss(net.norm)  # pyright: ignore


# -- found in a profile ------------------------------------------------------------------------------------


def small(**changes):
    return zoo.small("gpt2", **{"vocab": 4000, "width": 32, "heads": 2, **changes})


def test_heads_are_found_where_their_logits_go_to_cross_entropy_alone():
    technique = ChunkedLoss()
    assert techniques()["chunked_loss"].name == "chunked_loss"
    work = small()
    assert {option.site for option in technique.options(profile(work))} == {("head",)}
    assert {option.site for option in technique.options(profile(replace(work, autocast=torch.bfloat16)))} == {("head",)}
    roberta = zoo.small("roberta-base")
    assert {option.site for option in technique.options(profile(roberta))} == {("head.4",)}

    def smoothed(model, batch):
        return F.cross_entropy(model(batch[0]).transpose(1, 2), batch[1], label_smoothing=0.1)

    assert technique.options(profile(replace(work, loss=smoothed)))

    def also_read(model, batch):
        logits = model(batch[0])
        return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten()) + logits.square().mean()

    def scaled(model, batch):
        return F.cross_entropy((model(batch[0]) / 3).flatten(0, 1), batch[1].flatten())

    for loss in (also_read, scaled, lambda model, batch: model(batch[0]).square().mean()):
        assert not technique.options(profile(replace(work, loss=loss)))


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_the_price_is_near_the_traced_peak(autocast):
    technique, work = ChunkedLoss(), small(batch=4, seq=64, autocast=autocast)
    plain = profile(work)
    for option in technique.options(plain):
        traced = predict(work, [option], plain)
        estimate = estimate_peak(plain.graph, [technique.price(option, plain)])
        assert traced.peak_bytes < 0.7 * plain.peak_bytes
        assert estimate == pytest.approx(traced.peak_bytes, rel=0.05)
        with technique.apply(work, [option]) as applied:
            assert profile(applied.work).storage_peak_bytes == traced.storage_peak_bytes


def test_the_logits_are_never_whole_in_a_gpus_step():
    work = zoo.workload("gpt2", device="meta", layers=1, batch=8, autocast=torch.bfloat16)
    plain = profile(work, fake=True, device="h200")
    option = ChunkedLoss().options(plain)[0]
    assert option.config.rows == 2048
    traced = predict(work, [option], plain)
    logits = 8 * 1024 * 50257
    assert max(s.bytes for s in plain.graph.storages) == 4 * logits
    assert max(s.bytes for s in traced.graph.storages if s.category != "parameter") <= 2048 * 50304 * 2
    names = [op.name for op in traced.graph.ops]
    assert names.count("triton.chunked_loss_rows") == 4
    assert not any("log_softmax" in name for name in names)


def test_a_head_inside_recomputed_segments_is_right_and_saves():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 100))
    batch = torch.randn(64, 8), torch.randint(100, (64,))
    work = Workload(net, lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), batch)
    plain = profile(work)
    expected = torch.autograd.grad(work.compute_loss(), list(net.parameters()))
    options = [ChunkedLoss().options(plain)[-1], techniques()["sqrt"].options(plain)[0]]
    for both in (options, options[::-1]):
        with apply_options(work, both) as applied:
            gradients = torch.autograd.grad(applied.work.compute_loss(), list(net.parameters()))
            assert profile(applied.work).peak_bytes < 0.8 * plain.peak_bytes
        torch.testing.assert_close(gradients, expected)


def test_a_loss_of_logits_whose_weight_was_stepped_since_is_refused():
    head = nn.Linear(8, 16)
    optimizer = torch.optim.SGD(head.parameters(), lr=1.0)
    x, y = torch.randn(4, 8), torch.randint(16, (4,))
    with chunk_loss(head):
        logits = head(x)
        F.cross_entropy(logits, y).backward()
        optimizer.step()
        with pytest.raises(LowtideError) as refusal:
            F.cross_entropy(logits, y)
        assert "weight" in str(refusal.value)
        assert head(x)[()].shape == (4, 16)


def test_logits_that_a_planned_step_computes_whole_are_warned_about_once():
    work = small()
    heads = ChunkedLoss().options(profile(work, fake=True))
    with apply_options(work, heads[:1]) as applied:
        applied.work.compute_loss().backward()
        head = work.model.get_submodule(heads[0].site[0])
        with torch.no_grad():
            work.model(work.batch[0]).argmax(-1)
        handle = head.register_forward_hook(lambda module, args, logits: logits * 1.0)
        with pytest.warns(RuntimeWarning, match="computed whole"):
            applied.work.compute_loss().backward()
        applied.work.compute_loss().backward()
        handle.remove()
