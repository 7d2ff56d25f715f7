"""Targets that cross entropies count, wherever they run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.errors import WorkloadError
from lowtide.nn import compressed, linear_cross_entropy

from .steps import IGNORED, assert_same, cross_entropy, mlp, names, step

pytestmark = pytest.mark.filterwarnings("ignore:The model has batch norms in training:UserWarning")


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_cross_entropy_in_chunks_counts_as_torchs(size: int, smoothing: float) -> None:
    def loss(model: Any, batch: Any) -> Tensor:
        last = model[-1]
        x = model[:-1](batch[0])
        return linear_cross_entropy(x, last.weight, batch[1], last.bias, label_smoothing=smoothing, chunk=2)

    work = mlp(8, loss=loss, targets=IGNORED)
    plain = replace(work, loss=lambda m, b: F.cross_entropy(m(b[0]), b[1], label_smoothing=smoothing))
    assert_same(step(lowtide.microbatch(work, size)), step(plain))


Loss = Callable[[nn.Module, Any], Tensor]


def under(hooks: Callable[[], AbstractContextManager[Any]], inner: Loss = cross_entropy) -> Loss:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        with hooks():
            return inner(model, batch)

    return loss


HIDDEN: dict[str, Loss] = {
    "saved on the CPU": under(save_on_cpu),
    "compressed": under(lambda: compressed(keep=lambda _: True)),
    "hooks of one's own": under(lambda: saved_tensors_hooks(lambda t: t, lambda t: t)),
    "in a checkpoint": lambda m, b: checkpoint(cross_entropy, m, b, use_reentrant=False),
    "smoothed in a checkpoint": lambda m, b: checkpoint(
        lambda: F.cross_entropy(m(b[0]), b[1], label_smoothing=0.1), use_reentrant=False
    ),
    "in chunks in a checkpoint": lambda m, b: checkpoint(
        lambda: linear_cross_entropy(m[:-1](b[0]), m[-1].weight, b[1], m[-1].bias), use_reentrant=False
    ),
    "beside a metric": lambda m, b: (cross_entropy(m, b), counts_nothing(m, b))[0],
    "far behind the loss": lambda m, b: 1 + ((((cross_entropy(m, b) + 1) * 2 - 1) / 3) * 3 - 1) / 2 - 1,
    "as negative log-likelihood": under(save_on_cpu, lambda m, b: F.nll_loss(m(b[0]).log_softmax(1), b[1])),
    "of chosen tokens": lambda m, b: F.cross_entropy(m(b[0])[b[1] >= 0], b[1][b[1] >= 0]),
}


@torch.no_grad()
def counts_nothing(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1].clamp(min=0))


@pytest.mark.parametrize("name", HIDDEN)
def test_what_a_cross_entropy_counts_is_known_wherever_it_is(name: str) -> None:
    """In a batch where all counts, and in a later one with padding; also where "mean" was said."""
    work = mlp(8, loss=HIDDEN[name])
    later = replace(work, batch=(work.batch[0], IGNORED))
    for reduction in ("auto", "mean"):
        pieces = lowtide.microbatch(work, 3, reduction=reduction)
        assert_same(step(pieces), step(work))
        assert_same(step(replace(pieces, batch=later.batch)), step(later))


def test_hooks_around_the_whole_step_hide_no_count() -> None:
    work = mlp(8, targets=IGNORED)
    pieces = lowtide.microbatch(work, 3)
    with save_on_cpu():
        actual = step(pieces)
    assert_same(actual, step(work))


def test_a_count_that_cannot_be_seen_is_asked_for() -> None:
    nll = torch.ops.aten.nll_loss.default
    work = mlp(8, loss=under(save_on_cpu, lambda m, b: nll(m(b[0]).log_softmax(1), b[1])))
    for reduction in ("auto", "mean"):
        with names(pytest.raises(WorkloadError), "weight=", "F.cross_entropy"):
            lowtide.microbatch(work, 3, reduction=reduction).compute_loss()
    assert_same(step(lowtide.microbatch(work, 3, weight=lambda batch: len(batch[1]))), step(work))


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


@pytest.mark.parametrize("leaves_python", [False, True])
def test_compiled_modules_run_compiled_while_counts_are_seen(leaves_python: bool) -> None:
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    plain = mlp(8, loss=under(save_on_cpu), targets=IGNORED)
    expected = step(plain)
    model = plain.model if leaves_python else Around(plain.model)  # torch compiles no nn.Sequential by itself
    model.compile(backend=backend)
    pieces = lowtide.microbatch(replace(plain, model=model), 4, reduction="mean")
    for _ in range(2):
        actual = {name.removeprefix("inner."): value for name, value in step(pieces).items()}
        assert_same(actual, expected)
    assert len(graphs) == (0 if leaves_python else 1)
