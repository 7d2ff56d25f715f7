"""Seconds and peaks of a step that runs a few times, nothing traced."""

from __future__ import annotations

import gc
import time
from typing import Self

import torch
from torch import distributed

from lowtide.tracing.meter import CpuPeak, pooled_bytes
from lowtide.tracing.step_state import clear_gradients, static_bytes
from lowtide.workload import Workload

_ROUNDS = 3  # of steps that take longer than a moment, at the most
_MOST_ROUNDS = 12  # of short steps: a loss may print or count its calls
_LEAST_SECONDS = 0.05  # of short steps, whose noise is large
_ENOUGH_SECONDS = 0.5  # of each step, after which no other round begins


class RunMeter:
    """Time a block by the clock, and read the peak of a GPU's allocator in it; 0 elsewhere. Waits for the GPU.

    What pools of CUDA graphs hold beside their tensors counts, too.
    """

    seconds = 0.0
    peak_bytes = 0

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None

    def __enter__(self) -> Self:
        if self._device is not None:
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
        self._start = time.perf_counter()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self._device is not None:
            torch.cuda.synchronize(self._device)
        self.seconds = time.perf_counter() - self._start
        if kind is None and self._device is not None:
            self.peak_bytes = torch.cuda.max_memory_allocated(self._device) + pooled_bytes(self._device)


def best_seconds(*steps: Workload, whole: bool = False) -> list[float]:
    """Time a few forward and backward passes of each step, in turns, since the speed of a machine drifts.

    ``whole`` times the optimizer's step too. The first of each, which captures and warms up, does not count. Changes
    gradients and whatever the losses change: call it inside of ``unchanged``.
    """
    for step in steps:
        seconds_of_loss(step, whole=whole)
    rounds: list[list[float]] = []
    taken = 0.0
    for count in range(_MOST_ROUNDS):
        if taken >= (_ENOUGH_SECONDS if count < _ROUNDS else _LEAST_SECONDS) * len(steps):
            break
        rounds.append([seconds_of_loss(step, whole=whole) for step in steps])
        taken += sum(rounds[-1])
    return [min(each) for each in zip(*rounds, strict=True)]


def seconds_of_loss(work: Workload, *, whole: bool = False) -> float:
    """Time one forward and backward pass, and the optimizer's step if ``whole``. Leaves gradients set."""
    clear_gradients(work)
    with RunMeter(work.device) as run:
        _run(work, whole=whole)
    return run.seconds


def _run(work: Workload, *, whole: bool = True) -> None:
    loss = work.compute_loss()  # held to the end of the step, as in most loops
    loss.backward()
    if whole and work.optimizer is not None:
        work.optimizer.step()


def measured_peak(work: Workload, others: int = 0) -> int | None:
    """Measure the peak of a whole step, less ``others`` bytes of a GPU. Call it inside of ``unchanged``.

    None on a CPU where a profiler runs already.
    """
    seconds_of_loss(work, whole=True)  # which makes the optimizer's state, if it is the first
    clear_gradients(work)
    gc.collect()
    if work.device.type != "cuda":
        static = static_bytes(work)
        with CpuPeak() as meter:
            _run(work)
        return None if meter.bytes is None else meter.bytes + static
    torch.cuda.empty_cache()  # blocks that others left would be taken whole where a smaller one is asked for
    with RunMeter(work.device) as run:
        _run(work)
    return run.peak_bytes - others


def has_ranks() -> bool:
    """Tell whether there are other processes, whose clocks would choose other plans."""
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
