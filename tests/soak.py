"""Long counts: ``make soak`` runs every combination, the default run a part that still breaks with each promise."""

from __future__ import annotations

import os
from collections.abc import Iterable
from itertools import product
from typing import Any, TypeVar

T = TypeVar("T")
SOAK = bool(os.environ.get("LOWTIDE_SOAK"))


def in_soak(values: Iterable[T]) -> list[T]:
    """Values to test under ``make soak`` alone: ``[first, *in_soak(others)]``."""
    return list(values) if SOAK else []


def each_value(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Rows that hold each value of each axis, beside others each time. Under ``make soak`` all of their product.

    >>> each_value("abcd", (1, 2))
    [('a', 1), ('b', 2), ('c', 2), ('d', 1)]
    """
    lists = [list(axis) for axis in axes]
    rows = range(max(map(len, lists)))
    shifted = [tuple(axis[(row + row // len(axis)) % len(axis)] for axis in lists) for row in rows]
    return list(product(*lists)) if SOAK else shifted


def count(quick: int, soak: int) -> int:
    """The number of examples or draws."""
    return soak if SOAK else quick
