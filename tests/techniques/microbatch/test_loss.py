"""A loss in pieces is one loss to everybody else: hooks, optimizers, loss scales and second backwards."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide
from lowtide import Workload, zoo
from lowtide.errors import LowtideError, WorkloadError

from .steps import assert_same, cross_entropy, in_float64, mlp, step, without_randomness

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
    found = [p.grad for p in work.model.parameters()]
    for new, old in zip(found, expected, strict=True):
        torch.testing.assert_close(new, old, rtol=1e-12, atol=1e-15)


def test_hooks_run_once_with_the_gradient_of_the_whole() -> None:
    work = mlp()
    parameter = work.model[0].weight
    seen: list[Tensor] = []
    parameter.register_hook(lambda g: (seen.append(g.clone()), 2 * g)[1])
    after: list[Tensor] = []
    parameter.register_post_accumulate_grad_hook(lambda p: after.append(p.grad.clone()))
    expected = step(work)
    found = step(lowtide.microbatch(work, 2))
    assert_same(found, expected)
    assert len(seen) == len(after) == 2
    assert len(parameter._backward_hooks) == 1
    assert not any(p._backward_hooks for p in work.model[2].parameters())
    torch.testing.assert_close(seen[1], seen[0], rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(after[1], 2 * seen[1], rtol=1e-12, atol=1e-15)


def test_an_optimizer_in_backward_steps_once() -> None:
    plain, pieces = mlp(), mlp()
    for work in (plain, pieces):
        for parameter in work.model.parameters():
            own = torch.optim.SGD([parameter], lr=0.1)

            def update(_: Tensor, own: torch.optim.Optimizer = own) -> None:
                own.step()
                own.zero_grad()

            parameter.register_post_accumulate_grad_hook(update)
        (work if work is plain else lowtide.microbatch(work, 3)).compute_loss().backward()
    for new, old in zip(pieces.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(new, old, rtol=1e-12, atol=1e-15)
        assert new.grad is None


class Awkward(nn.Module):
    """A tied weight, a frozen one, one that is never used, one that one gradient goes to twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.unused = nn.Linear(5, 5)
        self.a, self.b = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
        self.out = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.frozen(self.second(self.first(x).tanh())).tanh()) + (self.a + self.b)


def test_tied_frozen_unused_and_shared_gradients_are_as_plain() -> None:
    torch.manual_seed(0)
    work = replace(mlp(), model=Awkward().double())
    found = step(lowtide.microbatch(work, 2))
    assert_same(found, step(work))
    assert "unused.weight.grad" not in found
    assert "frozen.weight.grad" not in found
    work.model.a.grad = work.model.b.grad = None
    lowtide.microbatch(work, 2).compute_loss().backward()
    assert work.model.a.grad.data_ptr() != work.model.b.grad.data_ptr()


def test_gradients_of_the_batch_and_of_tensors_beside_the_model() -> None:
    plain = mlp()
    temperature = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    shift = torch.randn(5, dtype=torch.float64)
    x = plain.batch[0].requires_grad_()
    doubled = x * 2  # has a graph of its own
    work = replace(
        plain,
        loss=lambda m, b: F.cross_entropy(temperature * m(b["x"] + b["shift"]), b["y"]),
        batch={"x": doubled, "y": plain.batch[1], "shift": shift.requires_grad_()},
    )
    leaves = (x, shift, temperature)
    torch.autograd.backward(work.compute_loss(), retain_graph=True)
    expected = [leaf.grad.clone() for leaf in leaves if leaf.grad is not None]
    for leaf in leaves:
        leaf.grad = None
    lowtide.microbatch(work, 3, split=("x", "y")).compute_loss().backward()
    for leaf, old in zip(leaves, expected, strict=True):
        assert leaf.grad is not None
        torch.testing.assert_close(leaf.grad, old, rtol=1e-12, atol=1e-15)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_sparse_gradients_stay_sparse() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 4, sparse=True), nn.Flatten(), nn.Linear(12, 3)).double()
    work = Workload(model, cross_entropy, (torch.randint(50, (7, 3)), torch.randint(3, (7,))))
    work.compute_loss().backward()
    expected = model[0].weight.grad
    model.zero_grad()
    lowtide.microbatch(work, 3).compute_loss().backward()
    found = model[0].weight.grad
    assert found.is_sparse
    torch.testing.assert_close(found.to_dense(), expected.to_dense(), rtol=1e-12, atol=1e-15)


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
    expected, found = step(work), step(pieces)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    with torch.no_grad():
        value = lowtide.microbatch(work, 2).loss(work.model, work.batch)
        assert torch.equal(value, work.loss(work.model, work.batch))
        assert not value.requires_grad


def test_backward_runs_once_and_gives_no_gradients_of_gradients() -> None:
    work = lowtide.microbatch(mlp(), 3)
    loss = work.compute_loss()
    loss.backward(retain_graph=True)
    with pytest.raises(LowtideError, match="runs once"):
        loss.backward()
    with pytest.raises(LowtideError, match="Gradients of gradients"):
        torch.autograd.grad(work.compute_loss(), work.model[0].weight, create_graph=True)


def test_what_cannot_be_is_refused() -> None:
    work = mlp()
    for size in (0, -1, 2.0, True):
        with pytest.raises(LowtideError, match="not a number of samples"):
            lowtide.microbatch(work, size)
    with pytest.raises(LowtideError, match="Unknown reduction"):
        lowtide.microbatch(work, 2, reduction="median")
    with pytest.raises(LowtideError, match="already computed in pieces"):
        lowtide.microbatch(lowtide.microbatch(work, 4), 2)
    with pytest.raises(WorkloadError, match="not a scalar"):
        lowtide.microbatch(mlp(loss=lambda m, b: m(b[0])), 2, reduction="mean").compute_loss()
    for parameter in work.model.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(WorkloadError, match="no graph"):
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
    plain, found = step(work), step(lowtide.microbatch(work, 2))
    errors = [
        sum(float((each[name].double() - value).norm() ** 2) for name, value in exact.items() if "grad" in name)
        for each in (plain, found)
    ]
    assert errors[1] <= 1.5**2 * errors[0]
