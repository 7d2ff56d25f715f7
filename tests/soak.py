"""Long counts: ``make soak`` runs every combination, the default run a part that still breaks with each promise."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")
SOAK = bool(os.environ.get("LOWTIDE_SOAK"))


def in_soak(values: Iterable[T]) -> list[T]:
    """Values to test under ``make soak`` alone: ``[first, *in_soak(others)]``."""
    return list(values) if SOAK else []


def count(quick: int, soak: int) -> int:
    """The number of examples or draws."""
    return soak if SOAK else quick
