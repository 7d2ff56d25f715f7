"""Batch norm in pieces: statistics move once as by the full batch, and ``exact`` normalises by it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide import zoo
from lowtide.errors import LowtideError
from lowtide.nn import BatchNormAct2d, BatchRenormAct2d

from .steps import Outcome, assert_same, in_float64, mlp, names, normed, step

pytestmark = pytest.mark.filterwarnings("ignore:The model has batch norms in training:UserWarning")


@pytest.mark.parametrize("momentum", [0.1, 1.0, None])
@pytest.mark.parametrize("norm", [nn.BatchNorm2d, BatchRenormAct2d])
def test_running_statistics_move_once_as_by_the_full_batch(momentum: float | None, norm: type[nn.Module]) -> None:
    """A first layer's input is the batch itself: mean and variance, between pieces too, are exact."""
    work = normed(norm(3, momentum=momentum))
    expected, actual = step(work), step(lowtide.microbatch(work, 3))
    for name in ("0.running_mean", "0.running_var"):
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-12, atol=1e-14)
    assert actual["0.num_batches_tracked"] == 1


def test_a_layer_that_runs_twice_moves_twice() -> None:
    norm = nn.BatchNorm2d(3)
    work = normed(norm, nn.Identity(), norm)
    before = step(work)
    actual = step(lowtide.microbatch(work, 3))
    assert actual["0.num_batches_tracked"] == before["0.num_batches_tracked"] == 2


def test_no_sample_is_left_alone_for_a_batch_norm() -> None:
    work = normed(nn.BatchNorm2d(3), samples=16)
    lengths: list[int] = []
    work.model[0].register_forward_pre_hook(lambda _, args: lengths.append(len(args[0])))
    lowtide.microbatch(work, 5, reduction="mean").compute_loss().backward()
    assert lengths == [5, 5, 3, 3]


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("tracks", [False, True])
def test_instance_norm_is_as_of_the_full_batch(exact: bool, tracks: bool) -> None:
    work = normed(nn.InstanceNorm2d(3, affine=True, track_running_stats=tracks))
    assert_same(step(lowtide.microbatch(work, 3, exact=exact)), step(work))


class Called(nn.Module):
    """Calls its norm in one of the ways there are."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.norm, self.how = nn.BatchNorm2d(3), how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "keyword":
            return self.norm(input=x)
        return self.norm.forward(x) if self.how == "forward" else self.norm(x)


@pytest.mark.parametrize(("how", "exact"), [("call", False), ("keyword", False), ("forward", False), ("forward", True)])
def test_however_a_layer_is_called(how: str, exact: bool) -> None:
    work = normed(Called(how))
    expected, actual = step(work), step(lowtide.microbatch(work, 3, exact=exact))
    for name in ("0.norm.running_mean", "0.norm.running_var", *(["loss"] if exact else [])):
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-12, atol=1e-14)
    assert actual["0.norm.num_batches_tracked"] == 1


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])  # for Ctrl-C, torch calls no hooks
@pytest.mark.parametrize(
    ("function", "piece"),
    [("batch_norm", 3), ("batch_norm", 2), ("cross_entropy", 2)],
    ids=["the layer in the first piece", "the layer in a later piece", "the loss"],
)
def test_a_layer_is_as_it_was_after_an_error(
    function: str, piece: int, error: type[BaseException], exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = normed(nn.BatchNorm2d(3))  # 7 samples: pieces of 3, 2 and 2
    norm = work.model[0]
    attributes, buffers = dict(vars(norm)), dict(norm._buffers)
    plain = getattr(torch.nn.functional, function)

    def fails(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if len(x) == piece:
            raise error
        return plain(x, *args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, function, fails)
    with pytest.raises(error):
        lowtide.microbatch(work, 3, reduction="mean", exact=exact).compute_loss()
    assert vars(norm) == attributes
    assert all(norm._buffers[name] is buffer for name, buffer in buffers.items())


@pytest.mark.parametrize("converted", [False, True])
def test_exact_gives_the_loss_and_the_statistics_of_the_full_batch(converted: bool) -> None:
    work = in_float64(zoo.small("resnet18", batch=8))
    expected = step(work)
    if converted:
        lowtide.convert(work.model)
    actual = step(lowtide.microbatch(work, 3, exact=True))
    pieces = step(lowtide.microbatch(work, 3))
    names = ["loss", *(name for name, _ in work.model.named_buffers())]
    for name in names:
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-9, atol=1e-12)
    assert abs(pieces["loss"] - expected["loss"]) > 1e-3  # without, it is another loss

    def error(outcome: Outcome) -> float:
        wrong = [outcome[name] - value for name, value in expected.items() if name.endswith(".grad")]
        return float(torch.stack([each.norm() for each in wrong]).norm())

    assert error(actual) < 0.7 * error(pieces)


def test_exact_is_exact_without_batch_norm_and_where_a_layer_keeps_no_statistics() -> None:
    work = mlp()
    assert_same(step(lowtide.microbatch(work, 3, exact=True)), step(work))
    untracked = normed(nn.BatchNorm2d(3, track_running_stats=False))
    actual = step(lowtide.microbatch(untracked, 3, exact=True))
    torch.testing.assert_close(actual["loss"], step(untracked)["loss"], rtol=1e-12, atol=0)
    assert untracked.model[0].running_mean is None


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, BatchNormAct2d])
def test_exact_refuses_a_gradient_penalty(norm: type[nn.Module]) -> None:
    """The gradient of a sum, which is a constant to autograd."""

    def penalty(model: nn.Module, batch: Any) -> Tensor:
        x = batch[0].clone().requires_grad_()
        with torch.enable_grad():  # statistics are taken without gradients
            (slope,) = torch.autograd.grad(model(x)[:, 0].sum(), x, create_graph=True)
        return slope.square().mean() + model(x).mean()

    work = replace(normed(norm(3)), loss=penalty)
    with names(pytest.raises(LowtideError), "gradients of gradients"):
        lowtide.microbatch(work, 3, reduction="mean", exact=True).compute_loss()


def test_exact_refuses_what_it_does_not_know() -> None:
    with names(pytest.raises(LowtideError), "BatchRenormAct2d", "exact=True"):
        lowtide.microbatch(normed(BatchRenormAct2d(3)), 3, exact=True).compute_loss()
