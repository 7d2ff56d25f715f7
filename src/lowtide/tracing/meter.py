"""Meters: allocations inside each op, and its seconds."""

from __future__ import annotations

import gc
import math
import os
import re
import time
from collections.abc import Callable, Generator, Hashable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lowtide.compat import profiler
from lowtide.compat.cuda import sleep
from lowtide.errors import TraceError


@dataclass(frozen=True, slots=True)
class Readings:
    """Measurements: seconds and workspace bytes of each op.

    ``held_bytes`` is allocated during the whole step without being a storage of it: libraries' workspaces
    (cuBLAS keeps one per thread). ``other_bytes`` belong to other tensors of the process.
    """

    seconds: list[float]
    workspace_bytes: list[int]
    held_bytes: int = 0
    other_bytes: int = 0


class Meter(Protocol):
    """Wrap every op of a step; give the readings after the step."""

    granularity: int

    def step(self) -> AbstractContextManager[None]:
        """Around the whole step."""
        ...

    def op(self, key: Hashable = None) -> AbstractContextManager[None]:
        """Around the next op. Ops with the same key allocate the same inside themselves; None: this one may not."""
        ...

    def readings(self, live: NDArray[np.int64], static_bytes: int) -> Readings:
        """Give the readings for ``live`` bytes at each op and ``static_bytes`` before, as the allocator rounds them."""
        ...


class NoMeter:
    """For fake steps: nothing runs, so there is nothing to measure."""

    def __init__(self, granularity: int = 1) -> None:
        self.granularity = granularity

    def step(self) -> AbstractContextManager[None]:
        return nullcontext()

    def op(self, key: Hashable = None) -> AbstractContextManager[None]:
        return nullcontext()

    def readings(self, live: NDArray[np.int64], static_bytes: int) -> Readings:
        return Readings([math.nan] * len(live), [0] * len(live))


class CpuMeter:
    """Reads the CPU allocator through torch's profiler, once for each kind of op, and times by the wall clock.

    The legacy profiler gives allocations in order, costs little and prints nothing. It inspects every op inside an op,
    so it runs only for new kinds of ops.
    """

    granularity = 1

    def __init__(self) -> None:
        self._seconds: list[float] = []
        self._keys: list[Hashable] = []
        self._inside: dict[Hashable, int] = {}

    def step(self) -> AbstractContextManager[None]:
        return nullcontext()

    def op(self, key: Hashable = None) -> AbstractContextManager[None]:
        return _MeteredOp(self, key)

    def knows(self, key: Hashable) -> bool:
        """Tell whether an op with this key was measured."""
        return key in self._inside

    def put(self, key: Hashable, seconds: float, threads: list[list[Any]] | None) -> None:
        """Record an op that ran, with the profiler's events if its kind was new."""
        key = ("op", len(self._keys)) if key is None else key
        self._keys.append(key)
        self._seconds.append(seconds)
        if threads is not None:
            peak, level = _peak_and_level(threads)
            self._inside[key] = peak - level

    def readings(self, live: NDArray[np.int64], static_bytes: int) -> Readings:
        return Readings(self._seconds, [self._inside[key] for key in self._keys])


def _peak_and_level(threads: list[list[Any]]) -> tuple[int, int]:
    """The most bytes allocated at once, and those at the end, above those at the start."""
    level = peak = 0
    for event in (event for events in threads for event in events if event.kind() == "memory_alloc"):
        level += event.cpu_memory_usage()
        peak = max(peak, level)
    return peak, level


class CpuPeak:
    """The most bytes that the CPU allocates in a ``with`` block above those at its start, in ``bytes`` after it.

    None where a profiler runs already: torch allows one at a time.
    """

    bytes: int | None = None

    def __enter__(self) -> Self:
        self._measures = profiler.can_start()
        if self._measures:
            profiler.start()
        return self

    def __exit__(self, kind: object, *exception: object) -> None:
        if self._measures:
            peak, _ = _peak_and_level(profiler.stop())
            self.bytes = peak if kind is None else None


class _MeteredOp:
    """Time one op, and profile it if its kind is new. A failed op is not recorded.

    A class, since a generator would cost more than many an op.
    """

    __slots__ = ("_key", "_learns", "_meter", "_start")

    def __init__(self, meter: CpuMeter, key: Hashable) -> None:
        self._meter = meter
        self._key = key
        self._learns = key is None or not meter.knows(key)

    def __enter__(self) -> None:
        if self._learns:
            if not profiler.can_start():
                raise TraceError(
                    "The step starts a profiler of its own, and torch allows one at a time",
                    hint="Trace the step without it.",
                )
            profiler.start()
        self._start = time.perf_counter()

    def __exit__(self, kind: object, *exception: object) -> None:
        seconds = time.perf_counter() - self._start
        threads = profiler.stop() if self._learns else None
        if kind is None:
            self._meter.put(self._key, seconds, threads)


_SHARED_POOL = (0, 0)  # the allocator's own name of it
_CUBLAS_THREADS = 2  # the step's and autograd's
_AHEAD_CYCLES = 300_000  # of a GPU's clock, some 150 µs: longer than it takes to launch most ops


class CudaMeter:
    """Reads the caching allocator's counters around each op, and times by device events.

    Gradients in ``aside`` exist before the step, and would not in a plain one. Other tensors of the process are the
    allocator's bytes at the start beyond the step's own. cuBLAS's workspaces count as the step's.
    """

    granularity = 512

    def __init__(self, device: torch.device, aside: Sequence[Tensor] = ()) -> None:
        self._device = device
        self._aside = sum(map(rounded, (tensor.nbytes for tensor in aside)))
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._levels: list[tuple[int, int, int]] = []  # allocated before, at the peak of, and after each op
        self._start = self._tensors = 0

    @contextmanager
    def step(self) -> Generator[None]:
        self._tensors = tensor_bytes(self._device)
        self._start = self._allocated()["current"]
        yield
        torch.cuda.synchronize(self._device)

    @contextmanager
    def op(self, key: Hashable = None) -> Generator[None]:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before = self._allocated()["current"]
        torch.cuda.reset_peak_memory_stats(self._device)
        sleep(_AHEAD_CYCLES)  # the op is queued before it ends, so only the GPU is timed
        start.record()
        yield
        end.record()
        after = self._allocated()
        self._events.append((start, end))
        self._levels.append((before, after["peak"], after["current"]))

    def readings(self, live: NDArray[np.int64], static_bytes: int) -> Readings:
        seconds = [start.elapsed_time(end) / 1e3 for start, end in self._events]
        # At least none: memory of another library, lent to a tensor, is not in the allocator's counters.
        others = max(0, self._tensors - self._aside - static_bytes)
        aside = self._aside + others
        held = self._start - aside - static_bytes
        workspaces: list[int] = []
        level = static_bytes
        for alive, (before, peak, after) in zip(live.tolist(), self._levels, strict=True):
            # Bytes that an op leaves beyond its outputs are a library's workspace, or the slack of a large block. The
            # allocator does not split off less than a MiB.
            left = (after - before) - (alive - level)
            level = alive
            if left > 2**20 and after - aside - alive > held:
                held = after - aside - alive
            workspaces.append(max(0, peak - aside - alive - held))
        return Readings(seconds, workspaces, max(0, held), others)

    def _allocated(self) -> dict[str, int]:
        return torch.cuda.memory.memory_stats_as_nested_dict(self._device)["allocated_bytes"]["all"]


def rounded(size: int) -> int:
    """Round a size up as a GPU's allocator does."""
    return -(-size // CudaMeter.granularity) * CudaMeter.granularity


def tensor_bytes(device: torch.device) -> int:
    """Read the bytes of live tensors on a GPU, each rounded as the allocator does, without cuBLAS's workspaces.

    cuBLAS holds one for each thread that multiplies matrices: the step's and autograd's. They are recognised by their
    size. A tensor of that size may be taken for one; a step then counts it as its own.
    """
    gc.collect()  # or tensors in cycles would be freed in the middle of the step
    torch.cuda.synchronize(device)
    blocks = [block for segment in _segments(device) for block in segment["blocks"]]
    blocks = [block for block in blocks if block["state"] == "active_allocated"]
    sizes = [block["requested_size"] for block in blocks]
    workspace = _cublas_workspace_bytes(device)
    return sum(map(rounded, sizes)) - workspace * min(sizes.count(workspace), _CUBLAS_THREADS)


def pooled_bytes(device: torch.device) -> int:
    """Read the bytes that pools of CUDA graphs hold on a GPU beside their tensors: nothing else can use them."""
    pools = [segment for segment in _segments(device) if segment["segment_pool_id"] != _SHARED_POOL]
    return sum(segment["total_size"] - segment["allocated_size"] for segment in pools)


def _segments(device: torch.device) -> list[dict[str, Any]]:
    """Memory that a GPU's allocator took from the driver, in segments with their blocks."""
    index = torch.cuda.current_device() if str(device) == "cuda" else device.index
    return [segment for segment in torch.cuda.memory_snapshot() if segment["device"] == index]


def _cublas_workspace_bytes(device: torch.device) -> int:
    """Bytes of one workspace as torch allocates it: by CUBLAS_WORKSPACE_CONFIG (":4096:8"), or its default."""
    pairs = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if pairs:
        return sum(int(kib) * 1024 * int(count) for kib, count in pairs)
    is_recent = torch.cuda.get_device_capability(device)[0] >= 9
    return 4096 * 1024 * 8 if is_recent else 4096 * 1024 * 2 + 16 * 1024 * 8


def measure_cpu_call(call: Callable[[], object]) -> int:
    """Bytes that one call allocates above its outputs."""
    meter = CpuMeter()
    with meter.op():
        out = call()
    del out
    return meter.readings(np.zeros(1, np.int64), 0).workspace_bytes[0]
