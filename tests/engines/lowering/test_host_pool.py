"""Values on the host: the plain step's bits, the simulator's bytes, and blocks that are used again."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from lowtide import Workload, zoo
from lowtide.engines import graph
from lowtide.engines.lowering import host_pool
from lowtide.engines.lowering.host_pool import HostPool
from lowtide.planning.programs.program import Kind, Program, simulate
from lowtide.tracing.capture.joint import Joint
from tests.models import layers, squares

from ...planning.held import offloading
from ...soak import in_soak
from ..counting import assert_equal, executed_peak, plain_results, results

Loss = Callable[[Any], Tensor]


class Offloading:
    """Plans the program with most on the host, and shows it and its pool."""

    def __init__(self) -> None:
        self.programs: list[Program] = []

    def __call__(self, joint: Joint) -> Program:
        self.programs.append(offloading(joint))
        return self.programs[-1]


@pytest.fixture
def pools() -> Iterator[list[HostPool]]:
    """Pools that are made meanwhile."""
    made: list[HostPool] = []
    original = HostPool.__init__

    def noted(self: HostPool, *args: Any) -> None:
        original(self, *args)
        made.append(self)

    with mock.patch.object(HostPool, "__init__", noted):
        yield made


def offloaded(work: Workload) -> tuple[Loss, Offloading]:
    planner = Offloading()
    return graph.planned_loss(work, planner), planner


@pytest.mark.parametrize("name", ["lenet", "gpt2", *in_soak(["unet", "lstm"])])
def test_an_offloaded_step_has_the_plain_steps_bits_and_the_simulated_peak(name: str) -> None:
    work = zoo.small(name)
    loss, planner = offloaded(work)
    expected = plain_results(work)
    assert_equal(results(work, loss), expected)
    (program,) = planner.programs
    kinds = [each.kind for each in (*program.forward, *program.backward)]
    assert kinds.count(Kind.FETCH) >= kinds.count(Kind.OFFLOAD) > 0
    assert executed_peak(work, loss) == simulate(program).peak_bytes


def test_the_first_step_allocates_the_block_and_later_steps_use_it_again(pools: list[HostPool]) -> None:
    work = zoo.small("lenet")
    loss, planner = offloaded(work)
    loss(work.batch).backward()
    (pool,) = pools
    (block,) = pool.idle
    assert block.nbytes == pytest.approx(max(simulate(planner.programs[0]).host_bytes), abs=512 * len(pool.places))
    for _ in range(3):
        loss(work.batch).backward()
        assert pool.idle == [block]


def test_two_forward_passes_before_backward_have_a_block_each(pools: list[HostPool]) -> None:
    work = zoo.small("lenet")
    loss, _ = offloaded(work)
    expected = [work.compute_loss(batch=work.batch) for _ in range(2)]
    sum(expected).backward()  # pyright: ignore[reportAttributeAccessIssue]
    gradients = [p.grad.clone() for p in work.model.parameters() if p.grad is not None]
    work.model.zero_grad()
    first, second = loss(work.batch), loss(work.batch)
    (first + second).backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(work.model.parameters(), gradients, strict=True))
    assert len(pools[0].idle) == 2


class Interrupt(BaseException):
    """As Ctrl-C raises it."""


@pytest.mark.parametrize("where", ["OnHost", "Fetched"])
def test_an_interrupted_step_leaves_the_pool_to_the_next(pools: list[HostPool], where: str) -> None:
    work = Workload(
        layers(6, 16, nn.GELU),
        squares,
        torch.randn(64, 16),
    )
    loss, planner = offloaded(work)
    expected = results(work, loss)
    assert sum(each.kind is Kind.OFFLOAD for each in planner.programs[0].forward) > 2
    original = getattr(host_pool, where).__init__
    left = [2]

    def interrupted(self: Any, *args: Any) -> None:
        left[0] -= 1
        if not left[0]:
            raise Interrupt
        original(self, *args)

    with mock.patch.object(getattr(host_pool, where), "__init__", interrupted), pytest.raises(Interrupt):
        loss(work.batch).backward()
    gc.collect()
    assert len(pools[0].idle) == 1
    assert_equal(results(work, loss), expected)
    assert len(pools[0].idle) == 1


# -- on a GPU --------------------------------------------------------------------------------------------


def steps(work: Workload, loss: Loss, count: int = 4) -> list[Tensor]:
    """Gradients and losses of a few steps that move the parameters, with the same dropout masks each time."""
    torch.manual_seed(3)
    found: list[Tensor] = []
    for _ in range(count):
        work.model.zero_grad()
        value = loss(work.batch)
        value.backward()
        found += [value.detach().clone(), *(p.grad.clone() for p in work.model.parameters() if p.grad is not None)]
        with torch.no_grad():
            for parameter in work.model.parameters():
                if parameter.grad is not None:
                    parameter -= 1e-2 * parameter.grad
    return found


@pytest.mark.gpu
def test_copies_beside_the_ops_of_a_gpu_keep_the_bits() -> None:
    work = zoo.small("gpt2", device="cuda")
    start = {name: value.clone() for name, value in work.model.state_dict().items()}
    loss, _ = offloaded(work)
    beside = steps(work, loss, 10)
    work.model.load_state_dict(start)
    plain = steps(work, lambda batch: work.compute_loss(batch=batch), 10)
    torch.testing.assert_close(beside, plain)


@pytest.mark.gpu
def test_no_pinned_memory_is_allocated_after_the_first_step(pools: list[HostPool]) -> None:
    work = zoo.small("unet", device="cuda", batch=16)
    loss, planner = offloaded(work)
    loss(work.batch).backward()
    (block,) = pools[0].idle
    assert block.is_pinned()
    held = torch.cuda.memory_allocated()
    with mock.patch.object(torch, "empty", side_effect=AssertionError):
        loss(work.batch).backward()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == held
    assert pools[0].idle == [block]
    assert max(simulate(planner.programs[0]).host_bytes) > 2**20


@pytest.mark.gpu
def test_an_interrupted_fetch_writes_to_no_other_tensor() -> None:
    """The tensor of a fetch that nothing waited for stays with the pool until its copy is done."""
    work = zoo.small("unet", device="cuda", batch=16)
    loss, _ = offloaded(work)
    expected = results(work, loss)
    start = copy.deepcopy(work.model.state_dict())  # the interrupted pass moves running statistics
    with mock.patch.object(host_pool.Fetched, "wait", side_effect=Interrupt), pytest.raises(Interrupt):
        loss(work.batch).backward()
    work.model.load_state_dict(start)
    others = [torch.zeros(2**20, device="cuda") for _ in range(64)]
    torch.cuda.synchronize()
    assert not any(other.any() for other in others)
    del others
    torch.testing.assert_close(results(work, loss), expected, rtol=1e-2, atol=1e-4)
