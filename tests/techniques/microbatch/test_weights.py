"""How much each piece counts: means and sums are told apart, and what a mean leaves out does not count."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide
from lowtide.errors import WorkloadError
from lowtide.nn import linear_cross_entropy

from .steps import assert_same, cross_entropy, mlp, step

IGNORED = torch.tensor([1, -100, -100, 2, 0, -100, 1, 2])


def masked_mean(model: nn.Module, batch: Any) -> Tensor:
    each = F.cross_entropy(model(batch[0]), batch[1].clamp(min=0), reduction="none")
    mask = (batch[1] >= 0).double()
    return (each * mask).sum() / mask.sum()


def info_nce(model: nn.Module, batch: Any) -> Tensor:
    z = F.normalize(model(batch[0]), dim=1)
    return F.cross_entropy(z @ z.T * 3, torch.arange(len(z)))


LOSSES: dict[str, Callable[[nn.Module, Any], Tensor]] = {
    "mean of cross entropy": cross_entropy,
    "sum of cross entropy": lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="sum"),
    "mean of squares": lambda m, b: m(b[0]).square().mean(),
    "sum of squares": lambda m, b: m(b[0]).square().sum(),
    "half a cross entropy": lambda m, b: cross_entropy(m, b) / 2,
    "label smoothing": lambda m, b: F.cross_entropy(m(b[0]), b[1], label_smoothing=0.1),
    "a shape of one": lambda m, b: F.cross_entropy(m(b[0]), b[1]).reshape(1),
}


@pytest.mark.parametrize("name", LOSSES)
def test_reductions_are_found(name: str) -> None:
    work = mlp(7, loss=LOSSES[name])
    assert_same(step(lowtide.microbatch(work, 3)), step(work))


@pytest.mark.parametrize("name", ["mean of cross entropy", "sum of cross entropy", "label smoothing"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_ignored_targets_do_not_count(name: str, size: int) -> None:
    """Also where a whole piece is ignored: its mean is 0 / 0."""
    work = mlp(8, loss=LOSSES[name])
    work = replace(work, batch=(work.batch[0], IGNORED))
    assert_same(step(lowtide.microbatch(work, size, reduction="sum" if "sum" in name else "mean")), step(work))


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_cross_entropy_in_chunks_counts_as_torchs(size: int, smoothing: float) -> None:
    def loss(model: Any, batch: Any) -> Tensor:
        last = model[-1]
        x = model[:-1](batch[0])
        return linear_cross_entropy(x, last.weight, batch[1], last.bias, label_smoothing=smoothing, chunk=2)

    work = mlp(8, loss=loss)
    work = replace(work, batch=(work.batch[0], IGNORED))
    plain = replace(work, loss=lambda m, b: F.cross_entropy(m(b[0]), b[1], label_smoothing=smoothing))
    assert_same(step(lowtide.microbatch(work, size)), step(plain))


MIXED: dict[str, Callable[[nn.Module, Any], Tensor]] = {
    "a penalty on outputs": lambda m, b: cross_entropy(m, b) + m(b[0]).square().mean(),
    "two cross entropies": lambda m, b: cross_entropy(m, b) + F.cross_entropy(2 * m(b[0]), b[1]),
    "class weights and a penalty": lambda m, b: (
        F.cross_entropy(m(b[0]), b[1], weight=torch.tensor([1.0, 5.0, 0.5], dtype=torch.float64))
        + m(b[0]).square().mean()
    ),
}


@pytest.mark.parametrize("name", MIXED)
def test_a_mean_over_what_counts_beside_something_else_is_refused_where_not_all_counts(name: str) -> None:
    work = mlp(8, loss=MIXED[name])
    ignoring = replace(work, batch=(work.batch[0], IGNORED))
    with pytest.raises(WorkloadError, match=r"neither of them|no one weight of a piece is right"):
        lowtide.microbatch(ignoring, 3).compute_loss()
    if "class weights" not in name:
        assert_same(step(lowtide.microbatch(work, 3)), step(work))


def test_a_later_batch_is_refused_too_where_its_targets_do_not_all_count() -> None:
    work = mlp(8, loss=MIXED["a penalty on outputs"])
    pieces = lowtide.microbatch(work, 3)
    assert_same(step(pieces), step(work))
    with pytest.raises(WorkloadError, match=r"no one weight of a piece is right.*weight="):
        pieces.compute_loss(batch=(work.batch[0], IGNORED))


def test_padding_at_the_end_of_a_batch_shows_in_the_trial() -> None:
    def by_hand(model: nn.Module, batch: Any) -> Tensor:
        total = F.cross_entropy(model(batch[0]), batch[1], reduction="sum")
        return total / (batch[1] != -100).sum()

    work = mlp(8, loss=by_hand)
    work = replace(work, batch=(work.batch[0], torch.tensor([1, 0, 2, 1, 2, -100, -100, -100])))
    with pytest.raises(WorkloadError, match=r"neither of them.*weight="):
        lowtide.microbatch(work, 2).compute_loss()


def test_class_weights_count() -> None:
    weight = torch.tensor([1.0, 5.0, 0.5], dtype=torch.float64)
    work = mlp(8, loss=lambda m, b: F.cross_entropy(m(b[0]), b[1], weight=weight))
    assert_same(step(lowtide.microbatch(work, 3)), step(work))


@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_weight_counts_what_only_the_caller_knows(as_tensor: bool) -> None:
    work = mlp(8, loss=masked_mean)
    work = replace(work, batch=(work.batch[0], IGNORED))

    def count(batch: Any) -> Any:
        found = (batch[1] >= 0).sum()
        return found if as_tensor else int(found)

    for size in (1, 3):  # by one, some pieces count nothing
        assert_same(step(lowtide.microbatch(work, size, weight=count)), step(work))
    with pytest.raises(WorkloadError, match=r"neither of them.*weight="):
        lowtide.microbatch(work, 3).compute_loss()


def test_a_loss_whose_samples_see_each_other_is_refused() -> None:
    with pytest.raises(WorkloadError, match="samples see each other"):
        lowtide.microbatch(mlp(7, loss=info_nce), 3).compute_loss()


def test_a_loss_that_draws_random_numbers_must_say_its_reduction() -> None:
    work = mlp(7, loss=lambda m, b: (m(b[0]) - torch.randn(len(b[0]), 3)).square().mean())
    with pytest.raises(WorkloadError, match="draws random numbers"):
        lowtide.microbatch(work, 3).compute_loss()
    lowtide.microbatch(work, 3, reduction="mean").compute_loss().backward()


def test_trying_the_reduction_leaves_nothing_behind() -> None:
    work = mlp(7)
    model = nn.Sequential(nn.BatchNorm1d(5), *work.model, nn.Dropout(0.5)).double()
    work = replace(work, model=model)
    given, tried = (lowtide.microbatch(work, 4, reduction=r) for r in ("mean", "auto"))
    expected, found = step(given), step(tried)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert model.training
    assert all(p.grad is None for p in model.parameters())
