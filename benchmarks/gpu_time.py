"""How long a call takes on a GPU: as it is launched, and alone."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch


def timed(run: Callable[[], object], *, calls: int = 20, rounds: int = 5) -> list[float]:
    """Seconds of a call, calls one after the other, as in training: what Python costs counts where it shows."""
    for _ in range(3):
        run()
    taken: list[float] = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        for _ in range(calls):
            run()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end) / 1e3 / calls)
    return taken


def replayed(run: Callable[[], object], *, calls: int = 10, rounds: int = 5) -> list[float]:
    """Seconds of a call on the GPU alone: calls are captured as a graph, and the graph is replayed."""
    return [seconds / calls for seconds in timed(captured(run, calls), calls=2, rounds=rounds)]


def captured(run: Callable[[], object], calls: int = 1) -> Callable[[], object]:
    """Capture calls as a CUDA graph. Its replay takes the GPU's time alone."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(calls):
            run()
    return graph.replay


def copy_bandwidth() -> float:
    """Bytes a second of a copy, read and written."""
    source = torch.empty(2**28, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / statistics.median(timed(lambda: target.copy_(source)))
