"""A training step as benchmarks run it: plain, under a technique, and all that it leaves."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from lowtide import Workload
from lowtide.profiling.timing import RunMeter
from lowtide.tracing.snapshot import unchanged

Way = Callable[[], AbstractContextManager[object]]


def plain_step(work: Workload) -> Tensor:
    """The loss, backward, the optimizer; gradients of the step before are freed first."""
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
    return 0 if work.device.type == "cpu" else cuda_peak(lambda: plain_step(work))


def cuda_peak(run: Callable[[], object]) -> int:
    """The most bytes that torch's allocator gives out during a call."""
    with RunMeter(torch.device("cuda")) as meter:
        run()
    return meter.peak_bytes


def timed_steps(work: Workload, steps: int = 12) -> tuple[list[float], int]:
    """Seconds of some steps, each waited for, and their peak."""
    runs: list[RunMeter] = []
    for _ in range(steps):
        with RunMeter(work.device) as meter:
            plain_step(work)
        runs.append(meter)
    return [run.seconds for run in runs], max(run.peak_bytes for run in runs)


def relative_error(tensors: Iterable[Tensor], exact: Iterable[Tensor]) -> float:
    """Norm of the difference over the norm, of all tensors as one vector."""
    squares = [
        (float((a.double() - b.double()).square().sum()), float(b.double().square().sum()))
        for a, b in zip(tensors, exact, strict=True)
    ]
    return math.sqrt(sum(off for off, _ in squares) / sum(whole for _, whole in squares))


def seconds_of(work: Workload, steps: int = 3) -> float:
    """Seconds of a step by the clock, one after another."""
    with RunMeter(work.device) as meter:
        for _ in range(steps):
            plain_step(work)
    return meter.seconds / steps


def under(way: Way, run: Callable[[], object]) -> Callable[[], object]:
    """Wrap a call in a technique."""

    def wrapped() -> object:
        with way():
            return run()

    return wrapped


def outcome(work: Workload) -> dict[str, Tensor]:
    """Copy all results of a step, then restore the state before it."""
    with unchanged(work):
        torch.manual_seed(0)
        loss = plain_step(work)
        model = work.model
        results = {"loss": loss, "generator": torch.get_rng_state()}
        results |= {f"{name}.grad": p.grad for name, p in model.named_parameters() if p.grad is not None}
        results |= dict(model.named_buffers())
        return {name: value.detach().clone() for name, value in results.items()}
