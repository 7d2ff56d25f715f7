"""torch's legacy profiler, which lists each allocation of the CPU in order."""

from __future__ import annotations

from typing import Any

from lowtide.compat.versions import Feature

_PROFILER = Feature("measuring memory on the CPU")
_is_running: Any = _PROFILER.find("torch._C:_autograd._profiler_enabled", None)
_start: Any = _PROFILER.find("torch._C:_autograd._enable_profiler_legacy", None)
_kinds: Any = _PROFILER.find("torch._C:_profiler")


def can_start() -> bool:
    """Tell whether the profiler is there and none runs; torch allows one at a time."""
    return not (_PROFILER.is_off or _start is None or _is_running is None or _is_running())


@_PROFILER
def start() -> None:
    """Start a profiler of memory on the CPU."""
    settings = (False, True, False, False, False, _kinds._ExperimentalConfig(), "")
    _start(_kinds.ProfilerConfig(_kinds.ProfilerState.CPU, *settings))


stop: Any = _PROFILER.find("torch._C:_autograd._disable_profiler_legacy")
"""Stop the profiler, and return its events by thread."""
