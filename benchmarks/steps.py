"""A training step as benchmarks run it: plain, under a technique, and all that it leaves."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from lowtide import Workload
from lowtide.tracing.snapshot import unchanged

Way = Callable[[], AbstractContextManager[object]]


def plain_step(work: Workload) -> Tensor:
    """The loss, backward, the optimizer; gradients of the step before are let go first."""
    assert work.optimizer is not None
    work.optimizer.zero_grad(set_to_none=True)
    loss = work.compute_loss()
    loss.backward()
    work.optimizer.step()
    return loss.detach()


def peak_of(work: Workload) -> int:
    """The allocated peak of one step on a GPU, after others; 0 on a CPU, where nothing counts it."""
    for _ in range(3):
        plain_step(work)
    if work.device.type == "cpu":
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    plain_step(work)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def seconds_of(work: Workload, steps: int = 3) -> float:
    """What a step takes, by the clock, one after another."""
    wait = torch.cuda.synchronize if work.device.type == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    for _ in range(steps):
        plain_step(work)
    wait()
    return (time.perf_counter() - start) / steps


def under(way: Way, run: Callable[[], object]) -> Callable[[], object]:
    """The same call with a technique put on before and taken off after."""

    def wrapped() -> object:
        with way():
            return run()

    return wrapped


def outcome(work: Workload) -> dict[str, Tensor]:
    """Everything that a step leaves, copied; the step itself is taken back."""
    with unchanged(work):
        torch.manual_seed(0)
        loss = plain_step(work)
        model = work.model
        found = {"loss": loss, "generator": torch.get_rng_state()}
        found |= {f"{name}.grad": p.grad for name, p in model.named_parameters() if p.grad is not None}
        found |= dict(model.named_buffers())
        return {name: value.detach().clone() for name, value in found.items()}
