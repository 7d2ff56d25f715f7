"""Optimizer hooks refuse closures, clipping, and whole parameters among several processes."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

import lowtide.optim as lo
from lowtide.optim.in_backward import is_stepped_in_backward
from tests.refusals import refused


@pytest.mark.parametrize(
    ("before", "named"),
    [
        (lambda optimizer: lo.store_gradients(optimizer, "8bit"), "Stored gradients"),
        (lambda optimizer: lo.scale_rates(optimizer, 4, warmup_steps=2), "Scaled rates"),
        (lambda optimizer: lo.LossScale().guard(optimizer), "scaled loss"),
    ],
    ids=["stored gradients", "scaled rates", "a scaled loss"],
)
def test_what_needs_the_step_refuses_steps_in_backward(before, named):
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    with before(optimizer):
        with refused(named, "steps in backward"):
            lo.step_in_backward(optimizer)
        assert not is_stepped_in_backward(weight)
    lo.step_in_backward(optimizer)()


def clip_with_norm(parameters, largest):
    parameters = list(parameters)
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    nn.utils.clip_grads_with_norm_(parameters, largest, norm)


@pytest.mark.parametrize("clip", [nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_, clip_with_norm])
@pytest.mark.parametrize("act", [lo.step_in_backward, lo.store_gradients])
def test_clipping_is_refused_where_gradients_are_gone(act, clip):
    model, other = nn.Linear(4, 4), nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def is_clipped(module: nn.Module) -> bool:
        clip(module.parameters(), 1e-3)
        return all(p.grad is not None and bool((p.grad.abs() <= 1e-3).all()) for p in module.parameters())

    with act(optimizer):
        (model(torch.ones(2, 4)) + other(torch.ones(2, 4))).sum().backward()
        for parameters in (model.parameters(), [*model.parameters(), *other.parameters()]):
            with refused("(4, 4)"):
                clip(parameters, 1e-3)
        assert is_clipped(other)
    model(torch.ones(2, 4)).sum().backward()
    assert is_clipped(model)


def watched() -> list[bool]:
    functions = (nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_, nn.utils.clip_grads_with_norm_)
    return [f.__wrapped__ not in [cell.cell_contents for cell in f.__closure__] for f in functions]


def test_torchs_clipping_is_restored_by_the_last_undo():
    assert not any(watched())
    for _ in range(2):
        first = lo.step_in_backward(torch.optim.SGD(nn.Linear(2, 2).parameters()))
        second = lo.store_gradients(torch.optim.SGD(nn.Linear(2, 2).parameters()))
        assert all(watched())
        first()
        first()
        assert all(watched())
        second()
        assert not any(watched())


@pytest.mark.parametrize("act", [lo.step_in_backward, lo.store_gradients])
def test_torchs_clipping_is_restored_when_the_last_optimizer_is_freed_without_an_undo(act):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    act(optimizer)
    act(torch.optim.SGD(nn.Linear(2, 2).parameters()))
    gc.collect()
    assert all(watched())
    del optimizer
    gc.collect()
    assert not any(watched())


@pytest.mark.parametrize("act", [lo.step_in_backward, lo.store_gradients])
def test_backward_raises_after_its_optimizer_was_freed_without_an_undo(act):
    model, x = nn.Linear(2, 2, bias=False), torch.ones(1, 2)
    act(torch.optim.SGD(model.parameters()))
    gc.collect()
    before = model.weight.detach().clone()
    with refused("(2, 2)", "reference", "undo()"):
        model(x).sum().backward()
    assert torch.equal(model.weight, before)
    with act(torch.optim.SGD(model.parameters())):  # the undo holds the optimizer
        gc.collect()
        model(x).sum().backward()
        assert model.weight.grad is None
    gc.collect()
    model.zero_grad()
    model(x).sum().backward()
    assert model.weight.grad is not None


@pytest.mark.parametrize("act", [lo.step_in_backward, lo.store_gradients])
def test_an_optimizer_that_uses_gradients_in_backward_is_freed_with_its_model(act):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    act(optimizer)
    model(torch.ones(1, 2)).sum().backward()
    weight = weakref.ref(model.weight)
    del model, optimizer
    gc.collect()
    assert weight() is None


def test_clipping_nothing_still_warns_while_it_is_watched():
    with (
        lo.step_in_backward(torch.optim.SGD(nn.Linear(2, 2).parameters())),
        pytest.warns(UserWarning, match="generator"),
    ):
        nn.utils.clip_grad_norm_((p for p in ()), 1.0)


def test_a_closure_is_refused():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.5)
    with lo.step_in_backward(optimizer), refused("closure"):
        optimizer.step(lambda: 0.0)


@pytest.fixture
def one_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("act", [lo.step_in_backward, lo.store_gradients])
def test_whole_parameters_among_several_processes_are_refused_before_anything_is_stepped(act, one_process, monkeypatch):
    """DistributedDataParallel sums gradients over processes after the hooks of parameters."""
    model = nn.Linear(4, 4)
    undo = act(torch.optim.SGD(model.parameters(), lr=0.1))
    sharded = nn.Parameter(distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (1,))))
    before = model.weight.detach().clone()
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    with refused("fully_shard"):
        model(torch.randn(2, 4)).sum().backward()
    assert torch.equal(model.weight, before)
    undo()
    with refused("fully_shard"):
        act(torch.optim.SGD(model.parameters(), lr=0.1))
    act(torch.optim.SGD([sharded], lr=0.1))()
