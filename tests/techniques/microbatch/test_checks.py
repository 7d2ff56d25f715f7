"""A batch whose loss is not the one that pieces were weighted for does not pass in silence."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide
from lowtide import Workload
from lowtide.techniques.microbatch import MicrobatchLoss

from .steps import masked_mean, mlp, names


def work_with_mask() -> Workload:
    work = mlp(8, loss=masked_mean)
    return Workload(work.model, masked_mean, (*work.batch, torch.ones(8).double()))


def test_a_divisor_that_is_no_piece_s_share_is_warned_about_once() -> None:
    work = work_with_mask()
    pieces = lowtide.microbatch(work, 2)
    pieces.compute_loss()
    padded = (*work.batch[:2], torch.tensor([1, 1, 1, 0, 0, 1, 1, 1.0]).double())
    with names(pytest.warns(RuntimeWarning), "divides by 2", "weight="):
        pieces.compute_loss(batch=(*work.batch[:2], torch.tensor([1, 1, 1, 1, 1, 1, 1, 0.0]).double()))
    pieces.compute_loss(batch=padded)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_means_and_sums_and_counted_targets_are_not_warned_about(size: int) -> None:
    losses = [
        lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="sum") / len(b[0]),
        lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="sum") / 4,
        lambda m, b: F.cross_entropy(m(b[0]), b[1], label_smoothing=0.1),
        lambda m, b: F.cross_entropy(m(b[0]), b[1]) / 4,
    ]
    for loss in losses:
        work = mlp(8, loss=loss)
        pieces = lowtide.microbatch(work, size)
        ignored = work.batch[1].clone()
        ignored[3:6] = -100
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            pieces.compute_loss()
            if loss is losses[2]:
                pieces.compute_loss(batch=(work.batch[0], ignored))


def by_flag(model: nn.Module, batch: Any) -> Tensor:
    each = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
    return each.sum() if batch["flag"] else each.mean()


def test_another_branch_of_the_loss_is_warned_about() -> None:
    x, y = mlp(8).batch
    work = Workload(mlp(8).model, by_flag, {"x": x, "y": y, "flag": False})
    pieces = lowtide.microbatch(work, 2)
    pieces.compute_loss()
    with names(pytest.warns(RuntimeWarning), "(Sum)", "(Mean)"):
        pieces.compute_loss(batch={"x": x, "y": y, "flag": True})


def test_a_batch_norm_that_comes_into_training_after_planning_is_warned_about() -> None:
    model = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3).eval()).double()
    work = Workload(model, mlp().loss, mlp(8).batch)
    loss = MicrobatchLoss(work, 4, proved="counted")
    loss(model, work.batch)
    model.train()
    with names(pytest.warns(RuntimeWarning), "Batch norms"):
        loss(model, work.batch)


@pytest.mark.parametrize("proved", ["mean", "counted"])
def test_a_cross_entropy_that_was_not_planned_is_warned_about(proved: Any) -> None:
    work = mlp(8, loss=(lambda m, b: m(b[0]).square().mean()) if proved == "counted" else mlp().loss)
    with names(pytest.warns(RuntimeWarning), "cross entropy"):
        MicrobatchLoss(work, 4, proved=proved)(work.model, work.batch)


# -- batch norm ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(3), lowtide.nn.BatchNormAct1d(3)])
def test_batch_norm_in_pieces_is_warned_about_and_exact_named(norm: nn.Module) -> None:
    work = Workload(nn.Sequential(nn.Linear(5, 3), norm).double(), mlp().loss, mlp(8).batch)
    with names(pytest.warns(UserWarning), "exact=True"):  # noqa: PT030
        lowtide.microbatch(work, 4).compute_loss()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lowtide.microbatch(work, 4, exact=True).compute_loss()
        work.model.eval()
        lowtide.microbatch(work, 4)
