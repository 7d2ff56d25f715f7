"""Record calls as CUDA graphs that share one pool of memory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from lowtide.compat.cuda import abandon_capture, clear_matmul_workspaces


class GraphRecorder:
    """Records calls on one GPU. Everything that they allocate lies in a pool, which lives as long as their graphs.

    The pool starts with one block of ``block_bytes``, which the allocator splits. Without it, the pool grows by blocks
    of the sizes that are asked for, which do not fit the next ones. Recording starts torch's peak counter anew.
    """

    device_type = "cuda"

    def __init__(self, device: torch.device, block_bytes: int = 0) -> None:
        self._device, self._block_bytes = device, block_bytes
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        clear_matmul_workspaces()  # so that the graphs get one in their pool
        torch.cuda.reset_peak_memory_stats(device)
        self._before = torch.cuda.memory_allocated(device)

    def record(self, code: Callable[[list[Any]], Any], arguments: list[Any]) -> tuple[Callable[[], None], Any]:
        """Record a call, which may empty the list of its arguments. Returns what launches it, and its results.

        Nothing runs before the first launch. An error of the call leaves torch ready for other graphs.
        """
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream(self._device)
        how: dict[str, Any] = {"pool": self._pool, "stream": self._stream, "capture_error_mode": "thread_local"}
        with torch.cuda.device(self._device):
            try:
                with torch.cuda.graph(graph, **how):
                    if self._block_bytes:
                        torch.empty(self._block_bytes, dtype=torch.uint8, device=self._device)  # and freed at once
                        self._block_bytes = 0
                    results = code(arguments)
            except BaseException:
                torch.cuda.set_stream(stream)
                abandon_capture(self._device, self._pool)
                raise
        return graph.replay, results

    def finish(self) -> tuple[int, int]:
        """Return the bytes of the pool, and the most that were allocated at a time. Nothing is recorded after it."""
        clear_matmul_workspaces()  # the one in the pool stays there for the graphs, and nothing else may take it
        segments = [each for each in torch.cuda.memory_snapshot() if each["segment_pool_id"] == self._pool]
        peak = torch.cuda.max_memory_allocated(self._device) - self._before
        torch.cuda.reset_peak_memory_stats(self._device)  # what was allocated while recording is the pool
        return sum(each["total_size"] for each in segments), peak

    @staticmethod
    def free() -> None:
        """Give back the memory of graphs that are gone."""
        with suppress(RuntimeError):  # while somebody else records
            torch.cuda.empty_cache()

    @staticmethod
    def is_recording() -> bool:
        """Tell whether somebody records on the current stream."""
        return torch.cuda.is_current_stream_capturing()
