"""Losses whose reduction is proved, beside losses that mix samples and are not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide import Workload, zoo
from lowtide.techniques.microbatch import MicrobatchLoss
from lowtide.techniques.microbatch.proof import Proof, prove
from tests.techniques.microbatch.steps import Scale, images, proof, proofs, texts

Loss = Callable[[nn.Module, Any], Tensor]


def each(m: nn.Module, b: Any) -> Tensor:
    """The loss of each token."""
    return F.cross_entropy(m(b[0]).flatten(0, 1), b[1].flatten(), reduction="none").view(len(b[0]), -1)


def hugging_face(m: nn.Module, b: Any) -> Tensor:
    """Shifted labels and logits in float32, as ``ForCausalLMLoss`` has them."""
    labels = F.pad(b[1], (0, 1), value=-100)[..., 1:].contiguous()
    logits = m(b[0]).float()
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1), ignore_index=-100)


def from_zero(m: nn.Module, b: Any) -> Tensor:
    total = torch.zeros(())
    for part in m(b[0]).split(2, dim=1):
        total = total + part.square().sum()
    return total


PROVED: dict[str, tuple[str, Loss, Callable[[], Any]]] = {
    "cross entropy": ("counted", lambda m, b: F.cross_entropy(m(b[0]), b[1]), images),
    "class weights": ("counted", lambda m, b: F.cross_entropy(m(b[0]), b[1], weight=torch.arange(1.0, 5)), images),
    "label smoothing": ("counted", lambda m, b: F.cross_entropy(m(b[0]), b[1], label_smoothing=0.1), images),
    "soft labels": ("mean", lambda m, b: F.cross_entropy(m(b[0]), b[0].softmax(-1)), images),
    "Hugging Face": ("counted", hugging_face, texts),
    "classes second": ("counted", lambda m, b: F.cross_entropy(m(b[0])[:, :-1].transpose(1, 2), b[1][:, 1:]), texts),
    "time first": (
        "counted",
        lambda m, b: F.cross_entropy(m(b[0].transpose(0, 1)).flatten(0, 1), b[1].T.flatten()),
        texts,
    ),
    "cross entropy and penalty": (
        "counted",
        lambda m, b: F.cross_entropy(m(b[0]), b[1]) + 0.1 * sum(p.square().sum() for p in m.parameters()),
        images,
    ),
    "two means": ("several", lambda m, b: F.cross_entropy(m(b[0]), b[1]) + m(b[0]).square().mean(), images),
    "sum": ("sum", lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="sum"), images),
    "sum over samples by their number": ("mean", lambda m, b: m(b[0]).square().sum() / len(b[0]), images),
    "sum by a tensor of their number": ("mean", lambda m, b: m(b[0]).sum() / torch.tensor(float(len(b[0]))), images),
    "scaled before the sum": ("mean", lambda m, b: (m(b[0]).square() / b[0].numel()).sum(), images),
    "sum by a constant": ("sum", lambda m, b: m(b[0]).square().sum() / 6, images),
    "mean of means": ("mean", lambda m, b: each(m, b).mean(1).mean(), texts),
    "mean over each sample's tokens": ("mean", lambda m, b: ((each(m, b) * b[2]).sum(1) / b[2].sum(1)).mean(), texts),
    "mean and penalty": ("mean", lambda m, b: m(b[0]).square().mean() + m[0].weight.norm(), images),
    "squared error": ("mean", lambda m, b: F.mse_loss(m(b[0]), b[0]), images),
    "binary cross entropy": (
        "mean",
        lambda m, b: F.binary_cross_entropy_with_logits(m(b[0]), F.one_hot(b[1], 4).float()),
        images,
    ),
    "divergence": (
        "mean",
        lambda m, b: F.kl_div(m(b[0]).log_softmax(1), b[0].softmax(1), reduction="batchmean"),
        images,
    ),
    "losses stacked": ("sum", lambda m, b: torch.stack([m(b[0]).sum(), m(b[0]).square().sum()]).mean(), images),
    "losses added from zero": ("sum", from_zero, images),
    "attention": ("mean", lambda m, b: F.scaled_dot_product_attention(*[m(b[0])[:, None]] * 3).mean(), texts),
    "each sample's own token": ("mean", lambda m, b: m(b[0])[torch.arange(len(b[0])), b[1][:, 0]].mean(), texts),
    "samples twice in a row": ("mean", lambda m, b: (m(torch.cat([b[0], b[0]])).square()).mean(), images),
    "beside an empty cache": ("mean", lambda m, b: torch.cat([torch.tensor([]), m(b[0])], -1).square().mean(), images),
    "each sample's class": ("mean", lambda m, b: m(b[0]).gather(1, b[1][:, None]).mean(), images),
    "norms of samples": ("mean", lambda m, b: F.normalize(m(b[0]), dim=1)[:, 0].mean(), images),
}


@pytest.mark.parametrize("batch", [images, texts])
def test_reductions_that_the_ops_show_are_proved(batch: Callable[[], Any]) -> None:
    cases = {name: (reduction, loss) for name, (reduction, loss, make) in PROVED.items() if make is batch}
    expected = {name: Proof(reduction) for name, (reduction, _) in cases.items()}  # pyright: ignore[reportArgumentType]
    assert proofs({name: loss for name, (_, loss) in cases.items()}, batch()) == expected


@pytest.mark.parametrize("name", PROVED)
def test_pieces_of_a_proved_loss_have_the_full_batch_s_gradients(name: str) -> None:
    """Also with ignored targets, where they are counted."""
    reduction, loss, make = PROVED[name]
    torch.manual_seed(0)
    batch = make()
    if reduction == "counted":
        batch[1].view(6, -1)[:2] = -100
    work = Workload(nn.Sequential(nn.Linear(4, 4)), loss, batch)
    expected = torch.autograd.grad(work.compute_loss(), list(work.model.parameters()))
    pieces = MicrobatchLoss(work, 4, proved=reduction)  # pyright: ignore[reportArgumentType]
    actual = torch.autograd.grad(pieces(work.model, batch), list(work.model.parameters()))
    torch.testing.assert_close(actual, expected)


def mean_in_groups(m: nn.Module, b: Any) -> Tensor:
    return (m(b[0]).view(2, -1, 4) - m(b[0]).view(2, -1, 4).mean(1, keepdim=True)).square().mean()


UNPROVED: dict[str, tuple[Loss, Callable[[], Any]]] = {
    "masked mean": (lambda m, b: (each(m, b) * b[2]).sum() / b[2].sum(), texts),
    "masked mean before the sum": (lambda m, b: (each(m, b) * b[2] / b[2].sum()).sum(), texts),
    "own count of targets": (lambda m, b: (each(m, b) * (b[1] != -100)).sum() / (b[1] != -100).sum(), texts),
    "sum and penalty": (lambda m, b: m(b[0]).square().sum() + m[0].weight.norm(), images),
    "sum and mean": (lambda m, b: m(b[0]).square().sum() + m(b[0]).square().mean(), images),
    "root of a mean": (lambda m, b: m(b[0]).square().mean().sqrt(), images),
    "mean subtracted": (lambda m, b: (m(b[0]) - m(b[0]).mean(0)).square().mean(), images),
    "variance": (lambda m, b: m(b[0]).var(0).mean(), images),
    "softmax over samples": (lambda m, b: m(b[0]).softmax(0).square().mean(), images),
    "largest sample": (lambda m, b: m(b[0]).amax(0).mean(), images),
    "sorted samples": (lambda m, b: (m(b[0]).sort(0).values * m(b[0])).mean(), images),
    "running sum": (lambda m, b: m(b[0]).cumsum(0).mean(), images),
    "similarity": (lambda m, b: F.cross_entropy(m(b[0]) @ b[0].T, torch.arange(len(b[0]))), images),
    "pairs": (lambda m, b: (m(b[0])[:, None] - m(b[0])[None]).square().mean(), images),
    "columns against rows": (lambda m, b: (m(b[0])[:, :1] - b[1]).square().mean(), images),
    "correlation": (lambda m, b: (m(b[0]).T @ m(b[0])).square().mean(), images),
    "one sample": (lambda m, b: (m(b[0]) * b[0][0]).mean(), images),
    "neighbours": (lambda m, b: (m(b[0]) * b[0].roll(1, 0)).mean(), images),
    "some samples": (lambda m, b: m(b[0])[1:].mean(), images),
    "half of the samples": (lambda m, b: m(b[0])[: len(b[0]) // 2].sum(), images),
    "every other sample": (lambda m, b: m(b[0])[::2].sum(), images),
    "reversed samples": (lambda m, b: (m(b[0]) * b[0].flip(0)).mean(), images),
    "another sample's target": (
        lambda m, b: F.cross_entropy(m(b[0].transpose(0, 1)).flatten(0, 1), b[1].flatten()),
        texts,
    ),
    "attention over samples": (lambda m, b: F.scaled_dot_product_attention(*[m(b[0])[None, None]] * 3).mean(), images),
    "weights by place": (lambda m, b: (m(b[0]).mean(1) * torch.arange(len(b[0]))).mean(), images),
    "chosen samples": (lambda m, b: m(b[0])[b[1]].mean(), images),
    "gathered samples": (lambda m, b: m(b[0]).gather(0, b[1][:, None]).mean(), images),
    "fewer rows gathered": (
        lambda m, b: m(b[0]).repeat_interleave(2, 0).gather(1, b[1][:, None]).mean(),
        images,
    ),
    "padded samples": (lambda m, b: F.pad(m(b[0]), (0, 0, 1, 0))[:-1].mul(b[0]).mean(), images),
    "samples beside others": (lambda m, b: torch.cat([m(b[0]), b[0].flip(0)], 1).prod(1).mean(), images),
    "square of the number": (lambda m, b: m(b[0]).sum() / len(b[0]) ** 2, images),
    "one less than the number": (lambda m, b: m(b[0]).sum() / (len(b[0]) - 1), images),
}


@pytest.mark.parametrize("batch", [images, texts])
def test_what_may_mix_samples_is_not_proved(batch: Callable[[], Any]) -> None:
    proved = proofs({name: loss for name, (loss, make) in UNPROVED.items() if make is batch}, batch())
    assert {name for name, each in proved.items() if each.reduction is not None or not each.why} == set()


class Backwards(torch.autograd.Function):
    """A gradient that mixes samples."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / gradient.norm()


def hooked(m: nn.Module, b: Any) -> Tensor:
    y = m(b[0])
    y.register_hook(lambda gradient: gradient / gradient.norm())
    return y.mean()


UNCAPTURED: dict[str, Loss] = {
    "a value": lambda m, b: m(b[0]).sum() / b[1].sum().item(),
    "a branch on values": lambda m, b: m(b[0]).mean() if b[1].all() else m(b[0]).sum() / b[1].sum(),
    "other ops for a few": lambda m, b: m(b[0]).mean() if len(b[0]) > 4 else m(b[0]).sum(),
    "a backward pass of its own": lambda m, b: Backwards.apply(m(b[0])).mean(),
    "a hook": hooked,
    "groups of samples": mean_in_groups,
}


@pytest.mark.parametrize("name", UNCAPTURED)
def test_what_is_not_the_same_graph_for_a_piece_is_not_proved(name: str) -> None:
    assert proof(UNCAPTURED[name], images()).reduction is None


def test_a_language_model_of_the_zoo_is_proved() -> None:
    assert prove(zoo.small("roberta-base", batch=3, layers=1)) == Proof("counted")


def test_a_proof_leaves_the_model_as_it_was() -> None:
    work = Workload(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), lambda m, b: m(b[0]).mean(), images())
    before = {name: value.clone() for name, value in work.model.state_dict().items()}
    assert "batch_norm" in prove(work).why
    assert all(torch.equal(value, before[name]) for name, value in work.model.state_dict().items())


class Warmup(nn.Module):
    """Counts its forward passes, as annealed losses do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.passes = nn.Linear(4, 4), 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        return self.linear(x) * min(1.0, self.passes / 10)


class Slotted(Scale):
    __slots__ = ("count", "factor")


_passes = [0]


def with_global(model: nn.Module, batch: Any) -> Tensor:
    _passes[0] += 1
    return model(batch[0]).square().mean() * min(1.0, _passes[0] / 10)


def with_argument(model: nn.Module, batch: Any, *, passes: list[int]) -> Tensor:
    passes[0] += 1
    return model(batch[0]).square().mean() * min(1.0, passes[0] / 10)


_held, _counts = {"scale": Scale()}, count(1)


def with_default(model: nn.Module, batch: Any, passes: dict[str, Scale] = _held) -> Tensor:
    return passes["scale"](model, batch)


def scaled(y: Tensor, passes: list[int] = _passes) -> Tensor:
    passes[0] += 1
    return y * passes[0]


COUNTING: dict[str, Callable[[], Loss]] = {
    "object": Scale,
    "object with slots": Slotted,
    "method of an object's object": lambda: SimpleNamespace(inner=Scale()).inner.__call__,
    "partial": lambda: partial(with_argument, passes=[0]),
    "partial of an object": lambda: partial(Scale()),
    "default argument": lambda: with_default,
    "default argument of another function": lambda: lambda m, b: scaled(m(b[0]).mean()),
    "wrapper": lambda: wraps(with_global)(Scale()),
    "global": lambda: with_global,
    "iterator": lambda: lambda m, b: m(b[0]).mean() * next(_counts),
    "tensor in place": lambda: Scale(torch.ones(()), lambda t: t.add_(1)),
    "tensor replaced": lambda: Scale(torch.ones(()), lambda t: t + 1),
}


@pytest.mark.parametrize("name", COUNTING)
def test_a_loss_that_counts_its_calls_is_not_proved(name: str) -> None:
    assert proof(COUNTING[name](), images()) == Proof(None, "a call of the loss changes what the next call may read")


def test_a_model_that_counts_its_passes_is_not_proved() -> None:
    model = Warmup()
    assert prove(Workload(model, lambda m, b: m(b[0]).square().mean(), images())).reduction is None
    assert model.passes == 0


def cross_entropy_of(model: nn.Module, batch: Any, criterion: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    return criterion(model(batch[0]), batch[1])


@pytest.mark.parametrize(
    "loss",
    [
        Scale(0.5, lambda factor: factor),
        Scale(torch.tensor(0.5), lambda factor: factor),
        partial(cross_entropy_of, criterion=partial(F.cross_entropy, label_smoothing=0.1)),
    ],
)
def test_a_loss_that_holds_constants_is_proved(loss: Loss) -> None:
    assert proof(loss, images()).reduction in ("mean", "counted")
