"""AdamW with 8-bit states as an optimizer of its own."""

import copy

import pytest
import torch
from torch import nn

import lowtide.optim as lo
from lowtide.errors import LowtideError
from tests.optim.training import BATCHES, OPTIMIZERS, equal, make, train


def test_8bit_states_follow_torchs_adamw():
    model, other = make(), make()
    train(model, OPTIMIZERS["AdamW"](model.parameters()), BATCHES)
    train(other, OPTIMIZERS["AdamW8bit"](other.parameters()), BATCHES)
    start = make()
    for p, q, s in zip(model.parameters(), other.parameters(), start.parameters(), strict=True):
        assert (p - q).norm() < 0.05 * (p - s).norm()


def test_channels_last_and_odd_parameters_step_as_contiguous_ones():
    torch.manual_seed(0)
    values = torch.randn(16, 24, 3, 5)
    gradient = torch.randn_like(values)
    results = []
    for layout in (torch.contiguous_format, torch.channels_last):
        p = nn.Parameter(values.clone(memory_format=layout))
        optimizer = lo.AdamW8bit([p], lr=0.1)
        for _ in range(3):
            p.grad = gradient.clone()
            optimizer.step()
        results.append(p.detach())
    assert results[1].is_contiguous(memory_format=torch.channels_last)
    # Other values share a block, so the codes differ a little; another order would be another step.
    assert (results[0] - results[1]).norm() < 0.02 * (results[0] - values).norm()
    gap = nn.Parameter(torch.randn(128, 128)[:, ::2])
    gap.grad = torch.randn(128, 64)
    before = gap.detach().clone()
    lo.AdamW8bit([gap], lr=0.1).step()
    assert ((gap - before).abs() > 0.05).all()


def test_a_parameter_with_gaps_in_another_order_is_stepped_as_a_dense_one():
    torch.manual_seed(0)
    wide = torch.randn(80, 100).t()[:64]
    assert not wide.is_contiguous()
    odd, plain = nn.Parameter(wide), nn.Parameter(wide.contiguous())
    gradient = torch.randn(64, 80)
    for weight in (odd, plain):
        weight.grad = gradient.clone()
        lo.AdamW8bit([weight], lr=0.1).step()
    assert torch.equal(odd, plain)


def test_moments_that_are_moved_in_place_are_found_again(monkeypatch):
    pytest.importorskip("triton")
    from lowtide.kernels import adamw8bit as kernels

    monkeypatch.setattr(kernels, "_fits", lambda entry: True)
    weight = nn.Parameter(torch.zeros(4096, device="cuda" if torch.cuda.is_available() else "cpu"))
    optimizer = lo.AdamW8bit([weight], lr=0.1)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    moments = optimizer.state[weight]["exp_avg"]
    old = moments.clone()
    held = moments.data
    moments.data = moments.data.clone()
    weight.grad.mul_(-3)
    optimizer.step()
    assert not torch.equal(moments, old)
    assert torch.equal(held, old)


# -- noise of each parameter's own -------------------------------------------------------------------------


def twins(count, **settings):
    """Parameters that are alike and get the same gradients, of which rounding to nearest would see nothing."""
    weights = [nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16)) for _ in range(count)]
    return weights, lo.AdamW8bit(weights, lr=1e-3, weight_decay=0.0, rounding="stochastic", **settings)


def test_each_parameter_has_noise_of_its_own_in_backward_too():
    results = []
    for in_backward in (False, True):
        weights, optimizer = twins(3)
        if in_backward:
            lo.step_in_backward(optimizer)
        for _ in range(2):
            optimizer.zero_grad()
            sum(w.float().sum() for w in weights).backward()
            optimizer.step()
        assert not torch.equal(weights[0], weights[1])
        assert not torch.equal(weights[1], weights[2])
        results.append([w.detach() for w in weights])
    assert equal(*results)


def test_a_parameters_noise_does_not_depend_on_who_is_stepped_with_it():
    results = []
    for trained in ((0, 1, 2, 3), (0, 2, 3), (3,)):
        weights, optimizer = twins(4)
        for i in trained:
            weights[i].grad = torch.ones_like(weights[i])
        optimizer.step()
        results.append(weights[3].detach())
    assert equal(results[1:], results[:1] * 2)


def test_groups_have_noise_of_their_own_in_backward_too():
    results = []
    for in_backward in (False, True):
        weights = [nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16)) for _ in range(3)]
        groups = [{"params": weights[:1]}, {"params": weights[1:]}]
        optimizer = lo.AdamW8bit(groups, lr=1e-3, rounding="stochastic")
        if in_backward:
            lo.step_in_backward(optimizer)
        sum(w.float().sum() for w in weights).backward()
        optimizer.step()
        assert not torch.equal(weights[0], weights[1])
        results.append([w.detach() for w in weights])
    assert equal(*results)


# -- states of torch's own ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lowers", [False, True])
def test_a_state_that_torch_saved_is_loaded_as_a_lowered_one_would_go_on(dtype, lowers):
    def plain():
        model = make(dtype)
        return model, OPTIMIZERS["AdamW"](model.parameters())

    def other():
        model, optimizer = plain()
        if lowers:
            lo.lower_state(optimizer, "8bit")
            return model, optimizer
        return model, lo.AdamW8bit(model.parameters(), lr=1.0)  # the rate is loaded too

    model, optimizer = plain()
    train(model, optimizer, BATCHES[:4])
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    lo.lower_state(optimizer, "8bit")
    expected = train(model, optimizer, BATCHES[4:8])

    model, optimizer = other()
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    assert optimizer.state[model[0].weight]["exp_avg"].dtype == torch.int8
    assert equal(train(model, optimizer, BATCHES[4:8]), expected)


@pytest.mark.parametrize(
    "make_optimizer",
    [lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9), lambda ps: torch.optim.AdamW(ps, amsgrad=True)],
    ids=["SGD", "amsgrad"],
)
def test_a_state_of_another_optimizer_is_refused_and_nothing_is_changed(make_optimizer):
    model = make()
    stranger = make_optimizer(model.parameters())
    train(model, stranger, BATCHES[:1])
    optimizer = OPTIMIZERS["AdamW8bit"](model.parameters())
    train(model, optimizer, BATCHES[:1])
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(LowtideError, match="amsgrad"):
        optimizer.load_state_dict(stranger.state_dict())
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for number, held in before["state"].items():
        assert all(torch.equal(after["state"][number][key], value) for key, value in held.items())


def test_amsgrad_is_refused_for_a_group_too():
    model = make()
    optimizer = OPTIMIZERS["AdamW8bit"](model[0].parameters())
    with pytest.raises(LowtideError, match="amsgrad"):
        optimizer.add_param_group({"params": list(model[2].parameters()), "amsgrad": True})
    assert len(optimizer.param_groups) == 1
