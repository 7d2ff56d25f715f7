"""Traces for peaks alone, which may skip repetitions with equal bytes."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar

_abridged: ContextVar[bool] = ContextVar("abridged", default=False)


@contextmanager
def abridged() -> Generator[None]:
    """Let traced steps skip repetitions that change no peak; seconds and sums are then too small."""
    token = _abridged.set(True)
    try:
        yield
    finally:
        _abridged.reset(token)


def is_abridged() -> bool:
    """Whether the trace needs peaks alone."""
    return _abridged.get()
