"""Plans on the graph engine, applied, and the same loop with them and in plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from lowtide import Workload
from lowtide.engines import Step, Verification, apply, plan, verify
from lowtide.errors import BudgetError
from lowtide.planning import Plan, refusal
from lowtide.profiling import Profile, profile
from lowtide.tracing.capture.loss import sharing_captures
from tests.models import squares

from ..tracing.allocator import _alive, allocated_peak
from .counting import Counter

Loss = Callable[[Any], Tensor]
IN_BACKWARD = "optimizer_in_backward"  # forbidden for loops that read gradients


@dataclass(frozen=True)
class Ready:
    """A plan applied, and the state that the model started from."""

    step: Step
    work: Workload
    start: dict[str, Tensor]

    def compare(self, loop: Callable[[Loss, nn.Module], Sequence[Tensor]], *, close: Sequence[str] = ()) -> None:
        """A loop with the planned loss and with a plain twin of the model: the same bits in all that is left."""
        twin = copy.deepcopy(self.work.model)
        losses: dict[nn.Module, Loss] = {self.work.model: self.step.loss, twin: lambda batch: squares(twin, batch)}
        left: list[list[Tensor]] = []
        rounded: list[list[Tensor]] = []
        for model, loss in losses.items():
            model.load_state_dict(self.start)
            model.zero_grad()
            torch.manual_seed(5)
            values = loop(loss, model)
            gradients = [p.grad for n, p in model.named_parameters() if p.grad is not None and n not in close]
            rounded.append([p.grad for p in map(model.get_parameter, close) if p.grad is not None])
            left.append([*values, *gradients, *model.state_dict().values(), torch.get_rng_state()])
            model.zero_grad()
        assert len(left[0]) == len(left[1])
        assert all(map(torch.equal, *left))
        torch.testing.assert_close(*rounded)

    def batches(self, count: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(7)
        return [torch.randn(self.work.batch.shape, generator=generator) for _ in range(count)]


def planned(work: Workload) -> Ready:
    """Apply a plan at a budget near the smallest, so that ops run again."""
    chosen = smallest_plan(work, share=1 / 8)
    assert chosen.program is not None
    assert chosen.program.ops_again > 0
    return Ready(apply(chosen, work), work, copy.deepcopy(work.model.state_dict()))


def smallest_plan(work: Workload, *, engine: str = "graph", allow: str = "roundoff", share: float = 0.0) -> Plan:
    """Plan at the smallest budget, or at one that is a share of the way to the plain step's peak."""
    plain = profile(work)
    smallest = smallest_budget(work, plain, engine, allow)
    budget = smallest + int(share * (plain.peak_bytes - smallest))
    return plan(work, budget, profile=plain, engine=engine, allow=allow, forbid=IN_BACKWARD, compile=False, tune=False)


def verified(work: Workload, *, engine: str = "graph", allow: str = "roundoff", share: float = 0.0) -> Verification:
    """Verify such a plan: results, bytes, and the engine that was asked for."""
    with sharing_captures(work):
        checked = assert_verified(work, smallest_plan(work, engine=engine, allow=allow, share=share))
    assert engine in ("auto", checked.plan.engine)
    return checked


def assert_verified(work: Workload, chosen: Plan) -> Verification:
    """A plan's results are as promised, and its storages to the byte."""
    checked = verify(work, chosen)
    assert checked.ok, str(checked)
    assert checked.storage_peak_bytes == chosen.storage_peak_bytes
    return checked


def smallest_budget(work: Workload, plain: Profile, engine: str = "graph", allow: str = "roundoff") -> int:
    with without_advice(), pytest.raises(BudgetError) as refused:
        plan(work, 1, profile=plain, engine=engine, allow=allow, forbid=IN_BACKWARD, compile=False, tune=False)
    assert refused.value.smallest_bytes is not None
    return refused.value.smallest_bytes


def without_advice() -> AbstractContextManager[Any]:
    """Leave the advice out of refusals: it predicts the step under every looser technique."""
    return mock.patch.object(refusal, "_advice", return_value="")


def recorded(chosen: Plan) -> Plan:
    """The plan with its program recorded as CUDA graphs."""
    assert chosen.program is not None
    return replace(chosen, program=replace(chosen.program, is_recorded=True))


def plain_loss(work: Workload) -> Loss:
    return lambda batch: work.compute_loss(batch=batch)


# -- bytes -----------------------------------------------------------------------------------------------


def assert_kept(step: Step, work: Workload, budget: int) -> None:
    """The promised storage peak is the traced and the counted one; the allocator's is within the budget."""
    assert step.profile().storage_peak_bytes == step.plan.storage_peak_bytes
    allocated = allocated_peak(work.model, lambda _, batch: step.loss(batch), work.batch, work.optimizer)
    assert allocated <= budget
    assert counted_peak(step, work) == step.plan.storage_peak_bytes
    work.model.zero_grad()


def counted_peak(step: Step, work: Workload) -> int:
    """The storages of a whole step, counted without lowtide."""
    work.model.zero_grad()
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in alive(work)}
    with Counter() as counter, mock.patch("torch.get_rng_state", counter.get_rng_state):
        value = step.loss(work.batch)  # held to the end of the step, as in most loops
        value.backward()
        if work.optimizer is not None:
            work.optimizer.step()
    return sum(held.values()) + counter.peak_bytes


def alive(work: Workload) -> Iterator[Tensor]:
    return _alive(work.model, work.batch, work.optimizer)


# -- steps -----------------------------------------------------------------------------------------------


def awkward(*, tied: bool = True) -> Workload:
    """Blocks of which two share a layer, the first frozen in part."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        linears = [nn.Linear(16, 16) for _ in range(4)]
        linears[3] = linears[1] if tied else linears[3]
        model = nn.Sequential(*map(Block, linears))
        model[0].norm.weight.requires_grad_(False)
        model[0].linear.bias.requires_grad_(False)
        return work_of(model, torch.randn(64, 16))


class Block(nn.Module):
    """All that is awkward: statistics, random numbers, in-place ops, parameters whose gradient is there before
    the gradient that still reads them."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear
        self.norm = nn.BatchNorm1d(16)
        self.act = nn.ReLU(inplace=True)
        self.drop = nn.Dropout(0.2)
        self.scale = nn.Parameter(torch.rand(96, 16))
        self.mix = nn.Parameter(torch.randn(16, 16) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.act(self.norm(self.linear(x)))) * self.scale[: len(x)] @ self.mix


def work_of(model: nn.Module, batch: Any, loss: Callable[[Any, Any], Tensor] | None = None) -> Workload:
    return Workload(model, loss or squares, batch, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
