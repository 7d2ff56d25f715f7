"""Optimizers that hold gradients or states elsewhere: nothing is lost, and nothing stepped that should not be."""

import pytest
import torch
from torch import nn

from lowtide.errors import LowtideError
from lowtide.optim import AdamW8bit, LossScale, lower_state, step_in_backward, store_gradients


def made(optimizer=torch.optim.SGD):
    weight = nn.Parameter(torch.zeros(4))
    return weight, optimizer([weight], lr=1.0)


def test_a_step_with_overflown_gradients_is_left_out_also_with_states_on_the_host():
    weight, optimizer = made(torch.optim.AdamW)
    lower_state(optimizer, "cpu")
    scale = LossScale()
    scale.guard(optimizer)
    weight.grad = torch.full((4,), float("inf"))
    optimizer.step()
    assert torch.equal(weight, torch.zeros(4))
    assert scale.value == 2.0**15


@pytest.mark.parametrize("other", [step_in_backward, store_gradients])
def test_a_scale_and_what_leaves_no_gradients_refuse_each_other(other):
    _, optimizer = made()
    with LossScale().guard(optimizer), pytest.raises(LowtideError, match="scaled loss"):
        other(optimizer)
    with other(optimizer), pytest.raises(LowtideError, match="scaled loss"):
        LossScale().guard(optimizer)
    LossScale().guard(optimizer)


def test_zero_grad_lets_go_of_stored_gradients():
    weight, optimizer = made()
    with store_gradients(optimizer):
        (weight * 100).sum().backward()
        optimizer.zero_grad()
        weight.sum().backward()
        optimizer.step()
    assert torch.equal(weight, -torch.ones(4))
    assert "zero_grad" not in vars(optimizer)


def test_a_state_that_was_saved_without_stored_gradients_is_loaded_with_them():
    weight, optimizer = made()
    saved = optimizer.state_dict()
    with store_gradients(optimizer):
        optimizer.load_state_dict(saved)
        weight.sum().backward()
        optimizer.step()
    assert torch.equal(weight, -torch.ones(4))


def test_a_parameter_with_gaps_in_another_order_is_stepped_as_a_dense_one():
    torch.manual_seed(0)
    wide = torch.randn(80, 100).t()[:64]
    assert not wide.is_contiguous()
    odd, plain = nn.Parameter(wide), nn.Parameter(wide.contiguous())
    gradient = torch.randn(64, 80)
    for weight in (odd, plain):
        weight.grad = gradient.clone()
        AdamW8bit([weight], lr=0.1).step()
    assert torch.equal(odd, plain)


def test_moments_that_are_moved_in_place_are_found_again(monkeypatch):
    pytest.importorskip("triton")
    from lowtide.kernels import adamw8bit as kernels

    monkeypatch.setattr(kernels, "_fits", lambda entry: True)
    weight = nn.Parameter(torch.zeros(4096))
    optimizer = AdamW8bit([weight], lr=0.1)
    weight.grad = torch.ones(4096)
    optimizer.step()
    moments = optimizer.state[weight]["exp_avg"]
    old = moments.clone()
    held = moments.data
    moments.data = moments.data.clone()
    weight.grad.mul_(-3)
    optimizer.step()
    assert not torch.equal(moments, old)
    assert torch.equal(held, old)
