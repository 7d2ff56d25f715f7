"""Programs in ways that are easy to name, what their steps leave, and their bytes counted without lowtide."""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide import Workload
from lowtide.chains import OptimalSchedules, Schedule, keep_all, recursive, sqrt
from lowtide.chains import simulate as run_chain
from lowtide.planning.programs.chain_order import program_of
from lowtide.planning.programs.program import Program
from lowtide.planning.programs.stages import Stages
from lowtide.tracing.capture.joint import Joint, bytes_of

PLANS: dict[str, Callable[[OptimalSchedules], Schedule]] = {
    "all": lambda plans: keep_all(plans.chain),
    "light": lambda plans: keep_all(plans.chain).lightly(),
    "sqrt": lambda plans: sqrt(plans.chain),
    "sqrt, light": lambda plans: sqrt(plans.chain).lightly(),
    "recursive": lambda plans: recursive(plans.chain),
    "smallest": lambda plans: plans.schedule(plans.smallest_bytes),
    "middle": lambda plans: plans.schedule((plans.smallest_bytes + _whole(plans)) // 2),
}


def _whole(plans: OptimalSchedules) -> int:
    return run_chain(plans.chain, keep_all(plans.chain)).peak_bytes


class Planner:
    """Plans by one of the ways above, and shows what it planned."""

    def __init__(self, way: str) -> None:
        self.way = way
        self.programs: list[Program] = []
        self.stages: list[Stages] = []

    def __call__(self, joint: Joint) -> Program:
        stages = Stages(joint)
        self.stages.append(stages)
        plans = OptimalSchedules(stages.chain(lambda node: 1e-9 * (1 + bytes_of(node))))
        self.programs.append(program_of(stages, PLANS[self.way](plans)))
        return self.programs[-1]


def results(work: Workload, loss: Callable[[Any], Tensor]) -> list[Tensor]:
    """Loss, gradients, buffers and the generator after a step, from the same state each time."""
    model = work.model
    start = copy.deepcopy(model.state_dict())
    model.zero_grad()
    torch.manual_seed(3)
    value = loss(work.batch)
    value.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    found = [value.detach(), *gradients, *(b.clone() for b in model.buffers()), torch.get_rng_state()]
    model.load_state_dict(start)
    return found


def plain_results(work: Workload) -> list[Tensor]:
    """The same of plain PyTorch."""
    return results(work, lambda batch: work.compute_loss(batch=batch))


def assert_equal(ours: Sequence[Tensor], plain: Sequence[Tensor]) -> None:
    """Bit for bit, and as many."""
    assert len(ours) == len(plain)
    assert all(map(torch.equal, ours, plain))


def executed_peak(work: Workload, loss: Callable[[Any], Tensor]) -> int:
    """The bytes above what is there before, of forward and backward, by a count that uses nothing of lowtide."""
    loss(work.batch)  # compiles
    work.model.zero_grad()
    with Counter() as counter, mock.patch("torch.get_rng_state", counter.get_rng_state):
        loss(work.batch).backward()
    return counter.peak_bytes


class Counter(TorchDispatchMode):
    """The bytes of storages that ops made and that live; nothing of lowtide is in it."""

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True  # or Dynamo would run the plain step

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, tuple[Any, int]] = {}
        self.bytes = self.peak_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in given and storage._cdata not in self.live:
                    self._born(storage)
        self.peak_bytes = max(self.peak_bytes, self.bytes)
        return out

    def get_rng_state(self, original: Callable[[], Tensor] = torch.get_rng_state) -> Tensor:
        """No op makes a generator's state. One that is there only while an op runs again is not a program's."""
        state = original()
        if sys._getframe(1).f_code.co_name == "_run_and_save_state":
            self._born(state.untyped_storage())
        return state

    def _born(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()

        def died(_: Any) -> None:
            del self.live[key]
            self.bytes -= size

        self.live[key] = weakref.ref(storage, died), size
        self.bytes += size


def count_calls(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[Any]:
    """A list that grows by the first argument of each call of a function or method."""
    calls: list[Any] = []
    original = getattr(owner, name)

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(args[0] if args else None)
        return original(*args, **options)

    monkeypatch.setattr(owner, name, counted)
    return calls
