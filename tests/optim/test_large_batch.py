"""Larger batches: rates that rise, LARS and LAMB."""

import copy
import sys

import pytest
import torch
from torch import nn

import lowtide.optim as lo
from lowtide.errors import MissingExtra
from tests.refusals import refused


def test_the_rate_rises_to_its_multiple():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    scheduler = lo.scale_batch(optimizer, 16, warmup_steps=10, rule="sqrt")
    rates = []
    for _ in range(12):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates[0] == pytest.approx(0.1)
    assert rates[5] == pytest.approx(0.25)
    assert rates[10:] == pytest.approx([0.4, 0.4])
    again = lo.scale_batch(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1), 16, warmup_steps=10, rule="sqrt")
    again.load_state_dict(scheduler.state_dict())
    assert again.state_dict()["last_epoch"] == scheduler.state_dict()["last_epoch"]


@pytest.mark.parametrize("make_optimizer", [lo.lars, lo.lamb])
def test_lars_and_lamb_name_the_extra_where_it_is_missing(make_optimizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(MissingExtra):
        make_optimizer([nn.Parameter(torch.ones(8, 8))], lr=0.1)


@pytest.mark.parametrize("make_optimizer", [lo.lars, lo.lamb])
def test_lars_and_lamb_are_those_of_bitsandbytes(make_optimizer):
    pytest.importorskip("bitsandbytes")
    weight = nn.Parameter(torch.ones(8, 8))
    optimizer = make_optimizer([weight], lr=0.1)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert (weight < 1).all()


# -- rates that are scaled while a step runs -----------------------------------------------------------------


def weights():
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(64, 64) / 10), nn.Parameter(torch.randn(64) / 10)]


def step(params, optimizer, i, scheduler=None):
    for n, p in enumerate(params):
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * i + n))
    optimizer.step()
    if scheduler is not None:
        scheduler.step()


@pytest.mark.parametrize("rule", ["linear", "sqrt"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_steps_are_those_of_the_scheduler_bit_for_bit(kind, rule):
    ours, theirs = weights(), weights()
    optimizer, other = kind(ours, lr=0.01), kind(theirs, lr=0.01)
    scheduler = lo.scale_batch(other, 16, warmup_steps=3, rule=rule)
    with lo.scale_rates(optimizer, 16, warmup_steps=3, rule=rule):
        for i in range(6):
            step(ours, optimizer, i)
            step(theirs, other, i, scheduler)
            assert optimizer.param_groups[0]["lr"] == 0.01
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_a_schedule_of_the_users_own_goes_on():
    ours, theirs = weights(), weights()
    optimizer, other = torch.optim.SGD(ours, lr=0.01), torch.optim.SGD(theirs, lr=0.04)
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(each, 5) for each in (optimizer, other)]
    with lo.scale_rates(optimizer, 4, warmup_steps=0):
        for i in range(5):
            step(ours, optimizer, i, schedules[0])
            step(theirs, other, i, schedules[1])
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
def test_the_undo_leaves_rates_groups_and_hooks_as_they_were(rate):
    params = weights()
    optimizer = torch.optim.SGD([{"params": params[:1]}, {"params": params[1:], "lr": 0.3}], lr=rate)
    groups = [dict(group) for group in optimizer.param_groups]
    undo = lo.scale_rates(optimizer, 3, warmup_steps=2)
    for i in range(3):
        step(params, optimizer, i)
    optimizer.load_state_dict(optimizer.state_dict())
    undo()
    assert [set(group) for group in optimizer.param_groups] == [set(group) for group in groups]
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.3]
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


def test_a_step_that_fails_does_not_scale_the_next_one_twice():
    params = weights()
    optimizer = torch.optim.SGD(params, lr=0.1)
    undo = lo.scale_rates(optimizer, 10, warmup_steps=0)
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)
    before = params[1].detach().clone()
    params[1].grad = torch.ones(64)
    optimizer.step()
    torch.testing.assert_close(params[1], before - 1.0)
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)
    undo()
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_a_resumed_run_is_as_warm_as_it_was():
    params = weights()
    optimizer = torch.optim.AdamW(params, lr=0.01)
    lo.scale_rates(optimizer, 8, warmup_steps=10)
    for i in range(3):
        step(params, optimizer, i)
    values, saved = copy.deepcopy([p.detach() for p in params]), copy.deepcopy(optimizer.state_dict())
    again = [nn.Parameter(value.clone()) for value in values]
    other = torch.optim.AdamW(again, lr=0.01)
    lo.scale_rates(other, 8, warmup_steps=10)
    other.load_state_dict(saved)
    for i in range(3, 6):
        step(params, optimizer, i)
        step(again, other, i)
    assert all(torch.equal(a, b) for a, b in zip(params, again, strict=True))


def test_parts_that_step_parameters_themselves_use_the_scaled_rate():
    ours, theirs = weights(), weights()
    optimizer, other = torch.optim.SGD(ours, lr=0.01), torch.optim.SGD(theirs, lr=0.04)
    with lo.lower_state(optimizer, "cpu"), lo.scale_rates(optimizer, 4, warmup_steps=0):
        step(ours, optimizer, 0)
        step(theirs, other, 0)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_what_cannot_be_scaled_is_refused():
    optimizer = torch.optim.SGD(weights(), lr=0.1)
    for wrong in ({"factor": 0}, {"warmup_steps": -1}, {"rule": "cubic"}):
        with refused(*(f"{name}={value!r}" for name, value in wrong.items())):
            lo.scale_rates(optimizer, **{"factor": 2, "warmup_steps": 1, **wrong})
    with lo.step_in_backward(optimizer), refused("stepped in backward"):
        lo.scale_rates(optimizer, 2, warmup_steps=1)
    with lo.scale_rates(optimizer, 2, warmup_steps=1), refused("rates", "undo()"):
        lo.scale_rates(optimizer, 2, warmup_steps=1)
    with refused("RMSprop"):
        lo.scale_rates(torch.optim.RMSprop(weights()), 2, warmup_steps=1, bound=0.1)
    assert not optimizer._optimizer_step_pre_hooks


@pytest.mark.parametrize("bound", [0.001, 1000.0])
@pytest.mark.parametrize(("kind", "ready"), [("SGD", "LARS"), ("AdamW", "LAMB")])
def test_a_bound_makes_lars_of_sgd_and_lamb_of_adam(kind, ready, bound):
    library = pytest.importorskip("bitsandbytes")
    options = {"lr": 0.01, "weight_decay": 0.1, **({"momentum": 0.9} if kind == "SGD" else {})}
    actual = {}
    for name, make in {
        "bounded": getattr(torch.optim, kind), "own": getattr(library.optim, ready), "plain": getattr(torch.optim, kind)
    }.items():  # fmt: skip
        params = weights()
        optimizer = make(params, **({**options, "max_unorm": bound} if name == "own" else options))
        undo = lo.scale_rates(optimizer, 4, warmup_steps=2, bound=bound if name == "bounded" else 0.0)
        for i in range(4):
            step(params, optimizer, i)
        actual[name] = params[0].detach().clone()
        undo()
        assert type(optimizer) is make
        step(params, optimizer, 4)  # and goes on from the states that there are
    assert torch.equal(actual["bounded"], actual["own"])
    start = weights()[0]
    if bound > 1:  # above all updates: the plain optimizer, with sums in another order
        torch.testing.assert_close(actual["bounded"], actual["plain"], rtol=1e-4, atol=1e-5)
    else:
        assert (actual["bounded"] - start).norm() < 0.9 * (actual["plain"] - start).norm()
