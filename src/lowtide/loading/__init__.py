"""Loading: a target on the command line in, a workload out. Reading arguments alone imports no torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lowtide.loading.targets import load, make_loader

__all__ = ["load", "make_loader"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module("lowtide.loading.targets"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
