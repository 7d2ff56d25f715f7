"""A loss in pieces is one loss to everybody else: hooks, optimizers, loss scales and second backwards."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide import Workload, zoo
from lowtide.errors import LowtideError, WorkloadError
from lowtide.optim import step_in_backward

from .steps import assert_same, cross_entropy, in_float64, mlp, names, step, without_randomness

# -- one loss to everybody else ------------------------------------------------------------------------


def test_only_one_piece_of_activations_lives() -> None:
    work = zoo.small("gpt2", batch=8, layers=4, optimizer="none")
    plain = lowtide.profile(without_randomness(work))
    quarter = lowtide.profile(lowtide.microbatch(without_randomness(work), 2))
    gradients = sum(p.nbytes for p in work.model.parameters())
    activations = plain.storage_peak_bytes - plain.static_bytes
    assert quarter.storage_peak_bytes - quarter.static_bytes <= activations / 4 + 1.5 * gradients


def test_gradients_add_up_over_steps_and_scale_with_the_loss() -> None:
    work = mlp()
    pieces = lowtide.microbatch(work, 3)
    for each in (work, pieces):
        each.model.zero_grad()
        for factor in (0.25, 3.0):
            (factor * each.compute_loss()).backward()
        if each is work:
            expected = [p.grad.clone() for p in work.model.parameters() if p.grad is not None]
    actual = [p.grad for p in work.model.parameters()]
    for new, old in zip(actual, expected, strict=True):
        torch.testing.assert_close(new, old, rtol=1e-12, atol=1e-15)


def test_an_optimizer_in_backward_steps_once() -> None:
    plain, pieces = mlp(), mlp()
    for work in (plain, pieces):
        with step_in_backward(torch.optim.SGD(work.model.parameters(), lr=0.1)):
            (work if work is plain else lowtide.microbatch(work, 3)).compute_loss().backward()
    for new, old in zip(pieces.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(new, old, rtol=1e-12, atol=1e-15)
        assert new.grad is None


def test_a_loss_that_takes_gradients_itself_is_as_plain() -> None:
    def penalised(model: nn.Module, batch: Any) -> Tensor:
        loss = cross_entropy(model, batch)
        # One that is linear in the samples: the gradient by the input, sample by sample.
        x = batch[0].detach().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return loss + slope.square().sum(1).mean()

    work = mlp(6, loss=penalised)
    assert_same(step(lowtide.microbatch(work, 4)), step(work))


def test_small_batches_and_no_grad_run_as_they_are() -> None:
    work = mlp(4)
    pieces = lowtide.microbatch(work, 4)
    expected, actual = step(work), step(pieces)
    assert all(torch.equal(actual[name], value) for name, value in expected.items())
    with torch.no_grad():
        value = lowtide.microbatch(work, 2).loss(work.model, work.batch)
        assert torch.equal(value, work.loss(work.model, work.batch))
        assert not value.requires_grad


def test_what_cannot_be_is_refused() -> None:
    work = mlp()
    for size in (0, -1, 2.0, True):
        with names(pytest.raises(LowtideError), f"size={size!r}"):
            lowtide.microbatch(work, size)
    with names(pytest.raises(LowtideError), "median"):
        lowtide.microbatch(work, 2, reduction="median")
    with names(pytest.raises(LowtideError), "already", "pieces"):
        lowtide.microbatch(lowtide.microbatch(work, 4), 2)
    with names(pytest.raises(WorkloadError), "scalar"):
        lowtide.microbatch(mlp(loss=lambda m, b: m(b[0])), 2, reduction="mean").compute_loss()
    for parameter in work.model.parameters():
        parameter.requires_grad_(False)
    with names(pytest.raises(WorkloadError), "graph"):
        lowtide.microbatch(work, 2, reduction="mean").compute_loss()


# -- precision -----------------------------------------------------------------------------------------


def test_gradients_that_float16_would_lose_are_kept_by_the_loss_scale() -> None:
    """As GradScaler has it: the scale comes back through the loss; from the second step on, pieces run at it."""
    torch.manual_seed(0)
    model = nn.Linear(64, 1, bias=False)
    batch = torch.rand(8, 64)
    work = Workload(model, lambda m, x: 1e-8 * m(x).float().mean(), batch, autocast=torch.float16)
    pieces = lowtide.microbatch(work, 2)
    exact = 1e-8 * batch.mean(0)
    for _ in range(2):
        model.zero_grad()
        (2.0**16 * pieces.compute_loss()).backward()
    torch.testing.assert_close(model.weight.grad[0] / 2**16, exact, rtol=5e-3, atol=0)


def test_an_overflow_shows_and_goes_away_with_the_scale() -> None:
    model = nn.Linear(64, 1, bias=False)
    work = Workload(model, lambda m, x: m(x).float().mean(), torch.rand(8, 64), autocast=torch.float16)
    pieces = lowtide.microbatch(work, 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=10**6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(12):
        optimizer.zero_grad()
        scaler.scale(pieces.compute_loss()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert 1 < scaler.get_scale() < 2.0**20
    assert model.weight.grad.isfinite().all()


def test_autocast_rounds_as_plain_does() -> None:
    torch.manual_seed(0)
    work = zoo.small("gpt2", batch=6, autocast=torch.bfloat16)
    without_randomness(work)
    exact = step(in_float64(replace(work, autocast=None)))
    work.model.float()
    plain, actual = step(work), step(lowtide.microbatch(work, 2))
    errors = [
        sum(float((each[name].double() - value).norm() ** 2) for name, value in exact.items() if "grad" in name)
        for each in (plain, actual)
    ]
    assert errors[1] <= 1.5**2 * errors[0]
