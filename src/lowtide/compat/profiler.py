"""torch's legacy profiler, which lists each allocation of the CPU in order."""

from __future__ import annotations

from typing import Any

import torch

_autograd: Any = vars(torch._C)["_autograd"]
_profiler: Any = vars(torch._C)["_profiler"]
_CPU_MEMORY = _profiler.ProfilerConfig(
    _profiler.ProfilerState.CPU, False, True, False, False, False, _profiler._ExperimentalConfig(), ""
)


def is_running() -> bool:
    """Tell whether a profiler runs; torch allows one at a time."""
    return _autograd._profiler_enabled()


def start() -> None:
    """Start a profiler of memory on the CPU."""
    _autograd._enable_profiler_legacy(_CPU_MEMORY)


def stop() -> Any:
    """Stop the profiler, and return its events by thread."""
    return _autograd._disable_profiler_legacy()
