"""torch's legacy profiler, which lists each allocation of the CPU in order."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

_autograd: Any = vars(torch._C)["_autograd"]


def is_running() -> bool:
    """Tell whether a profiler runs; torch allows one at a time."""
    return _autograd._profiler_enabled()


def start() -> None:
    """Start a profiler of memory on the CPU."""
    _autograd._enable_profiler_legacy(_configuration())


def stop() -> Any:
    """Stop the profiler, and return its events by thread."""
    return _autograd._disable_profiler_legacy()


@cache
def _configuration() -> Any:
    profiler: Any = vars(torch._C)["_profiler"]
    state, experimental = profiler.ProfilerState.CPU, profiler._ExperimentalConfig()
    return profiler.ProfilerConfig(state, False, True, False, False, False, experimental, "")
