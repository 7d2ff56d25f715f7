"""Traces for the sake of their peaks alone: what repeats itself to the byte need not run each time."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar

_abridged: ContextVar[bool] = ContextVar("abridged", default=False)


@contextmanager
def abridged() -> Generator[None]:
    """Inside, traced steps may leave out repetitions that change no peak; seconds and sums are then too small."""
    token = _abridged.set(True)
    try:
        yield
    finally:
        _abridged.reset(token)


def is_abridged() -> bool:
    """Whether only peaks are asked for."""
    return _abridged.get()
