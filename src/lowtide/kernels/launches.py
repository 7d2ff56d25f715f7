"""Launches of kernels in Triton, for whoever watches: they are no ops, so a dispatch mode does not see them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

from torch import Tensor

Watcher = Callable[[str, Sequence[Tensor | None], Callable[[], None]], None]

watcher: Watcher | None = None  # for all threads: backward runs on its own


@contextmanager
def watched(by: Watcher) -> Generator[None]:
    """Inside, ``by(name, tensors, launch)`` is called for each launch, which it may do or not.

    So fake tensors take the way of real ones: what a launch writes is there, and nothing else is needed of it.
    """
    global watcher
    before, watcher = watcher, by
    try:
        yield
    finally:
        watcher = before


def show(name: str, tensors: Sequence[Tensor | None], launch: Callable[[], None]) -> None:
    """Leave a launch to the watcher; while that is at it, launches go ahead."""
    global watcher
    by, watcher = watcher, None
    assert by is not None
    try:
        by(name, tensors, launch)
    finally:
        watcher = by
