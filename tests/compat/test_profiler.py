"""The legacy profiler lists allocations."""

from __future__ import annotations

import torch

from lowtide.compat import profiler


def test_allocations_are_listed_while_the_profiler_runs() -> None:
    assert profiler.can_start()
    profiler.start()
    assert not profiler.can_start()
    held = torch.ones(1024)
    threads = profiler.stop()
    assert profiler.can_start()
    sizes = [event.cpu_memory_usage() for events in threads for event in events if event.kind() == "memory_alloc"]
    assert held.nbytes in sizes
