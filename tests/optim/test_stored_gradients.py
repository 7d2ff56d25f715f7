"""Gradients that wait for the step in 16 or 8 bits."""

import pytest
import torch
from torch import nn

import lowtide.optim as lo
from lowtide.optim.gradients import pack, unpack
from tests.optim.training import BATCHES, make


@pytest.mark.parametrize("bits", ["16bit", "8bit"])
def test_stored_gradients_are_right_on_average_and_small(bits):
    torch.manual_seed(0)
    gradient = torch.randn(300)
    draws = torch.stack([unpack(pack(gradient, bits, seed=seed), gradient) for seed in range(2000)]).double()
    error = draws.std(0) / 2000**0.5
    # Each of 300 means lies within 3 standard errors but about one in 400.
    beyond = (draws.mean(0) - gradient.double()).abs() > 3 * error + 1e-9
    assert beyond.sum() <= 5
    codes, scale = pack(gradient, bits, seed=0)
    assert codes.nbytes == 300 * (2 if bits == "16bit" else 1)
    assert scale is None or scale.nbytes == 8


@pytest.mark.parametrize("bits", ["16bit", "8bit"])
def test_stored_gradients_are_summed_over_backwards(bits):
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    start = [p.detach().clone() for p in model.parameters()]
    for x in BATCHES[:4]:
        model(x).square().mean().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    optimizer.zero_grad()
    with lo.store_gradients(optimizer, bits):
        for x in BATCHES[:4]:
            model(x).square().mean().backward()
            assert all(p.grad is None for p in model.parameters())
        optimizer.step()
    for before, p, gradient in zip(start, model.parameters(), expected, strict=True):
        assert (before - p - gradient).norm() < (0.01 if bits == "16bit" else 0.1) * gradient.norm()


def made(optimizer=torch.optim.SGD):
    weight = nn.Parameter(torch.zeros(4))
    return weight, optimizer([weight], lr=1.0)


def test_zero_grad_lets_go_of_stored_gradients():
    weight, optimizer = made()
    with lo.store_gradients(optimizer):
        (weight * 100).sum().backward()
        optimizer.zero_grad()
        weight.sum().backward()
        optimizer.step()
    assert torch.equal(weight, -torch.ones(4))
    assert "zero_grad" not in vars(optimizer)


def test_a_state_that_was_saved_without_stored_gradients_is_loaded_with_them():
    weight, optimizer = made()
    saved = optimizer.state_dict()
    with lo.store_gradients(optimizer):
        optimizer.load_state_dict(saved)
        weight.sum().backward()
        optimizer.step()
    assert torch.equal(weight, -torch.ones(4))
