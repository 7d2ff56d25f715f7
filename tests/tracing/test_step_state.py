"""State of a step between steps: modules that the loss names, tensors of modules, and bytes of others."""

from functools import partial, wraps

import pytest
import torch
from torch import nn

from lowtide import Workload, apply, plan, profile, zoo
from lowtide.engines import step as steps
from lowtide.tracing import step_state, trace
from lowtide.tracing.step_state import (
    UnusedStorages,
    held_tensors,
    modules_of,
    other_bytes,
    static_bytes,
    watch_modules,
)
from tests.models import squares

MIB = 2**20


class Criterion(nn.Module):
    """Learns and counts."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, y):
        self.calls += 1
        return (y * self.scale).square().mean()


CRITERION = Criterion()
CRITERIA = {"first": [Criterion()]}


class Trainer:
    def __init__(self, criterion):
        self.criterion = criterion
        self.several = {"other": criterion}

    def loss(self, model, x):
        return self.criterion(model(x)) + self.several["other"](model(x))

    __call__ = loss


class Slotted:
    __slots__ = ("criterion",)

    def __init__(self, criterion):
        self.criterion = criterion

    def __call__(self, model, x):
        return self.criterion(model(x))


def with_globals(model, x):
    return CRITERION(model(x)) + CRITERIA["first"][0](model(x))


HOLDERS = {
    "closure": lambda mine: lambda model, x: mine(model(x)),
    "method": lambda mine: Trainer(mine).loss,
    "object": Trainer,
    "partial": lambda mine: partial(lambda model, x, criterion: criterion(model(x)), criterion=mine),
    "partial of a method": lambda mine: partial(Trainer(mine).loss),
    "default": lambda mine: lambda model, x, criterion=mine: criterion(model(x)),
    "wrapper": lambda mine: wraps(squares)(lambda model, x: mine(model(x)) + squares(model, x)),
    "slots": Slotted,
    "globals": lambda mine: with_globals,
}


@pytest.mark.parametrize("how", [{}, {"fake": True}], ids=["real", "fake"])
@pytest.mark.parametrize("holder", HOLDERS)
def test_a_criterion_that_the_loss_names_is_the_steps(holder, how):
    mine = Criterion()
    work = Workload(nn.Linear(4, 4), HOLDERS[holder](mine), torch.randn(3, 4))
    named = {CRITERION, *CRITERIA["first"]} if holder == "globals" else {mine}
    assert set(modules_of(work)) == {work.model, *named}
    trace(work, **how)
    for criterion in named:
        assert criterion.calls == 0
        assert criterion.scale.grad is None


def test_tensors_of_modules_are_found_in_containers_and_once():
    model, kept = nn.BatchNorm1d(4), torch.ones(500)
    model.cache = {"kept": [kept, (kept, [kept])]}
    work = Workload(model, squares, torch.randn(8, 4))
    held = [tensor for name, tensor in held_tensors(work) if name == "BatchNorm1d.cache"]
    assert [id(tensor) for tensor in held] == [id(kept)]
    model.samples = [torch.ones(1)] * 1001  # data
    assert not [name for name, _ in held_tensors(work) if name == "BatchNorm1d.samples"]
    since = watch_modules(work)
    model.cache["new"] = model.weight.detach()
    assert since() == []
    model.cache["new"] = torch.zeros(3)
    assert [name for name, _ in since()] == ["BatchNorm1d.cache"]


def test_static_bytes_count_storages_once():
    model = nn.Linear(4, 4, bias=False)
    model.view = model.weight.detach()[:2]
    work = Workload(model, squares, torch.randn(8, 4), torch.optim.Adam(model.parameters()))
    assert static_bytes(work) == (16 + 32) * 4
    squares(model, work.batch).backward()
    assert static_bytes(work) == (16 + 32) * 4  # gradients come and go
    work.optimizer.step()
    assert static_bytes(work) == (16 + 32 + 2 * 16 + 1) * 4


def test_bytes_beyond_the_steps_own_are_others(monkeypatch):
    work = Workload(nn.Linear(64, 64), squares, torch.randn(8, 64))
    assert other_bytes(work) == 0  # on a CPU
    monkeypatch.setattr(Workload, "device", torch.device("cuda"))
    pools = [7 * MIB]
    monkeypatch.setattr(step_state, "pooled_bytes", lambda _: sum(pools))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: pools.append(-2 * MIB))  # of a graph that is gone
    for requested, others in ((10 * MIB, 15 * MIB), (-100 * MIB, 0)):
        monkeypatch.setattr(step_state, "tensor_bytes", lambda _, size=requested: size)
        assert other_bytes(work) == others  # nothing of the step is on a GPU


def test_a_measured_step_is_judged_without_other_tensors(recwarn, monkeypatch):
    work = Workload(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)), squares, torch.randn(512, 64))
    chosen = plan(work, "100%", engine="eager")
    monkeypatch.setattr(steps, "other_bytes", lambda _: MIB)
    with apply(chosen, work) as step:
        step._note(1.0, chosen.peak_bytes + MIB)
        assert step.measured.peak_bytes == chosen.peak_bytes
        assert not recwarn
        monkeypatch.setattr(steps, "other_bytes", lambda _: MIB // 2)  # some are freed
        with pytest.warns(RuntimeWarning) as warned:
            step._note(1.0, chosen.peak_bytes + MIB)
        assert "512 KiB" in str(warned[0].message)


@pytest.mark.gpu
def test_other_tensors_on_the_gpu_change_no_peak():
    work = zoo.small("gpt2", device="cuda")
    trace(work)
    alone = profile(work)
    other = torch.ones(100 * MIB, device="cuda")
    beside = profile(work)
    assert beside.other_bytes - alone.other_bytes == other.nbytes
    assert beside.peak_bytes == pytest.approx(alone.peak_bytes, rel=0.001)
    with apply(plan(work, "100%", profile=beside, engine="eager"), work) as step:
        for _ in range(3):
            step(work.batch)
        assert step.measured.peak_bytes == pytest.approx(alone.peak_bytes, rel=0.02)


def test_storages_that_a_changed_step_does_not_use_are_counted_as_the_allocator_does():
    model = nn.Linear(10, 10, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    work = Workload(model, squares, torch.randn(2, 10), optimizer)
    work.compute_loss().backward()
    optimizer.step()
    unused = UnusedStorages(work)
    assert unused.bytes_beside(work) == 0
    held = optimizer.state.pop(model.weight)
    assert unused.bytes_beside(work) == 512  # 400 bytes of momentum, in blocks of 512
    del held
    assert unused.bytes_beside(work) == 0  # it is freed
    model.weight.data = model.weight.data.bfloat16()
    assert unused.bytes_beside(work) == 0
