"""Where kernels in Triton run, and their launches for whoever watches: they are no ops, which a dispatch mode sees."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from lowtide.compat.fake import FakeTensor

Watcher = Callable[[str, Sequence[Tensor | None], Callable[[], None]], None]

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

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


def can_run(x: Tensor, dtype: torch.dtype | None = None) -> bool:
    """Whether Triton can work on a tensor, whose values have another ``dtype`` where it holds their bytes."""
    runs = watcher is not None or not isinstance(x, FakeTensor)  # a watcher keeps fake tensors from a launch
    return x.is_cuda and (dtype or x.dtype) in _DTYPES and runs


@cache
def triton_kernels(name: str) -> Any:
    """A module of ``kernels/triton``; None where there is no Triton."""
    try:
        return import_module(f"lowtide.kernels.triton.{name}")
    except ImportError:
        return None
