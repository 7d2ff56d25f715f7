"""Profiles, comparisons, sweeps and plans as text, HTML and figures. Nothing heavy is imported until used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lowtide.reporting.figures import save_figure
    from lowtide.reporting.html import report
    from lowtide.reporting.terminal import progress, show, show_sweep
    from lowtide.reporting.value_timeline import Overlay

__all__ = ["Overlay", "progress", "report", "save_figure", "show", "show_sweep"]

_HOMES = {
    "Overlay": "value_timeline",
    "progress": "terminal",
    "report": "html",
    "save_figure": "figures",
    "show": "terminal",
    "show_sweep": "terminal",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"lowtide.reporting.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
