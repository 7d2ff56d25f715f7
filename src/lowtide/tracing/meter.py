"""Meters: what the allocator does inside each op, and how long the op takes."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch._C._profiler import _RecordFunctionFast


@dataclass(frozen=True, slots=True)
class Reading:
    """What one op did: seconds, bytes it allocated and freed inside itself, bytes its library kept."""

    seconds: float = math.nan
    inside_bytes: int = 0  # the most that was allocated during the op, above the level at its end
    kept_bytes: int = 0  # allocated during the op, alive at its end, and not one of its outputs


class Meter(Protocol):
    """Wraps every op of a step; gives one reading per op when the step is over."""

    granularity: int

    def step(self) -> AbstractContextManager[None]:
        """Around the whole step."""
        ...

    def op(self, index: int) -> AbstractContextManager[Any]:
        """Around one op."""
        ...

    def born(self, index: int, size: int) -> None:
        """Tell how many bytes of outputs an op made."""
        ...

    def readings(self) -> list[Reading]:
        """One per op, in order."""
        ...


class NoMeter:
    """For fake steps: nothing runs, so there is nothing to measure."""

    def __init__(self, granularity: int = 1) -> None:
        self.granularity = granularity
        self._count = 0

    def step(self) -> AbstractContextManager[None]:
        return nullcontext()

    def op(self, index: int) -> AbstractContextManager[Any]:
        self._count = index + 1
        return nullcontext()

    def born(self, index: int, size: int) -> None:
        pass

    def readings(self) -> list[Reading]:
        return [Reading()] * self._count


class CpuMeter:
    """Reads the CPU allocator through torch's profiler, and times by the wall clock.

    Each op is wrapped in a record-function mark; the allocation events inside a mark are the op's own.
    The legacy profiler gives them in order, costs little and prints nothing.
    """

    granularity = 1

    def __init__(self) -> None:
        self._seconds: list[float] = []
        self._born: dict[int, int] = {}
        self._levels: dict[int, tuple[int, int]] = {}  # op -> bytes at its end and at its peak, above its start

    @contextmanager
    def step(self) -> Iterator[None]:
        torch.autograd._enable_profiler_legacy(_profiler_config())
        try:
            yield
        finally:
            for thread in torch.autograd._disable_profiler_legacy():
                self._read(thread)

    @contextmanager
    def op(self, index: int) -> Iterator[None]:
        with _RecordFunctionFast(f"{_MARK}{index}"):
            start = time.perf_counter()
            yield
            self._seconds.append(time.perf_counter() - start)

    def born(self, index: int, size: int) -> None:
        self._born[index] = size

    def readings(self) -> list[Reading]:
        readings: list[Reading] = []
        for index, seconds in enumerate(self._seconds):
            level, peak = self._levels.get(index, (0, 0))
            kept = max(0, level - self._born.get(index, 0))
            readings.append(Reading(seconds, inside_bytes=peak - max(level, 0), kept_bytes=kept))
        return readings

    def _read(self, events: list[Any]) -> None:
        index, depth, level, peak = -1, 0, 0, 0
        for event in events:
            kind = event.kind()
            if kind == "push":
                if index < 0 and event.name().startswith(_MARK):
                    index, depth, level, peak = int(event.name()[len(_MARK) :]), 0, 0, 0
                elif index >= 0:
                    depth += 1
            elif kind == "pop" and index >= 0:
                if depth == 0:
                    self._levels[index] = (level, peak)
                    index = -1
                depth -= 1
            elif kind == "memory_alloc" and index >= 0:
                level += event.cpu_memory_usage()
                peak = max(peak, level)


class CudaMeter:
    """Reads the caching allocator's counters around each op, and times by device events."""

    granularity = 512

    def __init__(self, device: torch.device) -> None:
        self._device = torch.cuda.current_device() if device.index is None else device.index
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._levels: list[tuple[int, int, int]] = []
        self._born: dict[int, int] = {}

    @contextmanager
    def step(self) -> Iterator[None]:
        torch.cuda.synchronize(self._device)
        try:
            yield
        finally:
            torch.cuda.synchronize(self._device)

    @contextmanager
    def op(self, index: int) -> Iterator[None]:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before = self._allocated()["current"]
        torch._C._cuda_resetPeakMemoryStats(self._device)
        start.record()
        yield
        end.record()
        after = self._allocated()
        self._events.append((start, end))
        self._levels.append((before, after["peak"], after["current"]))

    def born(self, index: int, size: int) -> None:
        self._born[index] = size

    def readings(self) -> list[Reading]:
        torch.cuda.synchronize(self._device)
        return [
            Reading(
                seconds=start.elapsed_time(end) / 1e3,
                inside_bytes=peak - max(before, after),
                kept_bytes=max(0, after - before - self._born.get(index, 0)),
            )
            for index, ((start, end), (before, peak, after)) in enumerate(
                zip(self._events, self._levels, strict=True)
            )
        ]

    def _allocated(self) -> dict[str, int]:
        return torch._C._cuda_memoryStats(self._device)["allocated_bytes"]["all"]


def profiler_is_free() -> bool:
    """Whether the CPU meter can start: torch allows one profiler at a time."""
    return not torch._C._autograd._profiler_enabled()


_MARK = "lowtide#"


def _profiler_config() -> Any:
    from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig

    return ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig(), "")
