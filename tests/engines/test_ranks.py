"""Planned models under DDP and FSDP2 on two ranks: the losses and the state of plain ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from lowtide.engines import Step, apply, plan
from lowtide.errors import PlanError
from lowtide.workload import Workload
from tests.models import Call, blocks, squares
from tests.refusals import refused

from ..contract.workloads import Residual
from ..ranks import on_two_ranks
from .planned import work_of
from .test_eager import Trained, assert_same, deepest, planned, train, usual


def ddp_around_the_planned_loss_is_ddp_around_the_plain_one(rank: int) -> None:
    work = work_of(blocks(), torch.randn(96, 24))
    plain = DistributedDataParallel(copy.deepcopy(work.model), bucket_cap_mb=1e-3)
    step = apply(plan(work, "70%", engine="graph", tune=False), work)
    wrapped = DistributedDataParallel(Call(lambda _, x: step.loss(x), model=step.model), bucket_cap_mb=1e-3)
    torch.manual_seed(rank)
    for _ in range(3):
        batch = torch.randn_like(work.batch)
        squares(plain, batch).backward()
        wrapped(batch).backward()
        for ours, theirs in zip(wrapped.parameters(), plain.parameters(), strict=True):
            assert ours.grad is not None
            assert torch.equal(ours.grad, theirs.grad)


def a_ddp_model_is_not_captured_and_that_is_said(rank: int) -> None:
    inside = Workload(DistributedDataParallel(blocks()), squares, torch.randn(96, 24))
    with refused("captured", kind=PlanError):
        plan(inside, "70%", engine="graph", tune=False)


def same_on_ranks(rank: int, wrap: Callable[[nn.Module], nn.Module], plans: Callable[[Workload], Step]) -> None:
    """Train a planned local model and a plain one, both wrapped after."""
    results: list[Trained] = []
    for make_step in (lambda _: None, plans):
        torch.manual_seed(0)
        work = work_of(nn.Sequential(*(Residual(4) for _ in range(6))), torch.randn(16, 4, 6, 5))
        make_step(work)
        model = wrap(work.model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        wrapped = replace(work, model=model, optimizer=optimizer)
        trained = train(wrapped, usual, lambda batch, model=model: squares(model, batch), seed=rank)
        whole = {name: full(value) for name, value in trained.tensors.items()}
        results.append(replace(trained, tensors=whole))
    assert_same(results[1], results[0])
    counted = {int(v) for name, v in results[1].tensors.items() if name.endswith("num_batches_tracked")}
    assert counted == {3}


def full(value: Any) -> Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def sharded(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (2,))
    for block in model:
        fully_shard(block, mesh=mesh)  # parameters of a block are freed after its forward, until its backward
    return fully_shard(model, mesh=mesh)


def ddp_of_a_planned_model_is_ddp_of_the_plain_one(rank: int) -> None:
    same_on_ranks(rank, DistributedDataParallel, planned)


def fsdp2_in_the_deepest_nesting_is_fsdp2_of_the_plain_one(rank: int) -> None:
    same_on_ranks(rank, sharded, deepest)


test_on_two_ranks = on_two_ranks(
    ddp_around_the_planned_loss_is_ddp_around_the_plain_one,
    a_ddp_model_is_not_captured_and_that_is_said,
    ddp_of_a_planned_model_is_ddp_of_the_plain_one,
    fsdp2_in_the_deepest_nesting_is_fsdp2_of_the_plain_one,
)
