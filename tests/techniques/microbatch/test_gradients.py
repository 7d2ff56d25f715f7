"""Gradients of pieces, handed on as those of one loss."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide
from lowtide import Workload
from lowtide.errors import LowtideError

from .steps import assert_same, cross_entropy, mlp, names, step


def test_hooks_run_once_with_the_gradient_of_the_whole() -> None:
    work = mlp()
    parameter = work.model[0].weight
    seen: list[Tensor] = []
    parameter.register_hook(lambda g: (seen.append(g.clone()), 2 * g)[1])
    after: list[Tensor] = []
    parameter.register_post_accumulate_grad_hook(lambda p: after.append(p.grad.clone()))
    expected = step(work)
    actual = step(lowtide.microbatch(work, 2))
    assert_same(actual, expected)
    assert len(seen) == len(after) == 2
    assert len(parameter._backward_hooks) == 1
    assert not any(p._backward_hooks for p in work.model[2].parameters())
    torch.testing.assert_close(seen[1], seen[0], rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(after[1], 2 * seen[1], rtol=1e-12, atol=1e-15)


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
    actual = step(lowtide.microbatch(work, 2))
    assert_same(actual, step(work))
    assert "unused.weight.grad" not in actual
    assert "frozen.weight.grad" not in actual
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


def test_sparse_gradients_stay_sparse() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 4, sparse=True), nn.Flatten(), nn.Linear(12, 3)).double()
    work = Workload(model, cross_entropy, (torch.randint(50, (7, 3)), torch.randint(3, (7,))))
    work.compute_loss().backward()
    expected = model[0].weight.grad
    model.zero_grad()
    lowtide.microbatch(work, 3).compute_loss().backward()
    actual = model[0].weight.grad
    assert actual.is_sparse
    torch.testing.assert_close(actual.to_dense(), expected.to_dense(), rtol=1e-12, atol=1e-15)


def test_backward_runs_once_and_gives_no_gradients_of_gradients() -> None:
    work = lowtide.microbatch(mlp(), 3)
    loss = work.compute_loss()
    loss.backward(retain_graph=True)
    with names(pytest.raises(LowtideError), "once"):
        loss.backward()
    with names(pytest.raises(LowtideError), "create_graph=True"):
        torch.autograd.grad(work.compute_loss(), work.model[0].weight, create_graph=True)
