"""Launches of kernels in Triton: where they can run, with little Python, and shown to a watcher.

A dispatch mode sees ops, and a launch is none.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from lowtide.compat.cuda import current_stream
from lowtide.compat.fake import FakeTensor

Watcher = Callable[[str, Sequence[Tensor | None], Callable[[], None]], None]

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

watcher: Watcher | None = None  # for all threads: backward runs on its own


@contextmanager
def watched(by: Watcher) -> Generator[None]:
    """Inside, ``by(name, tensors, launch)`` is called for each launch, which it may do or not.

    So fake tensors take the path of real ones: the results of a launch are allocated, and no more is needed.
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


def fast_kernels(name: str, x: Tensor, dtype: torch.dtype | None = None) -> Any:
    """Return a module of ``kernels/triton`` that can work on a tensor; None without Triton or a GPU.

    The values have another ``dtype`` where the tensor holds their bytes.
    """
    runs = watcher is not None or not isinstance(x, FakeTensor)  # a watcher keeps fake tensors from a launch
    return triton_kernels(name) if x.is_cuda and (dtype or x.dtype) in _DTYPES and runs else None


@cache
def triton_kernels(name: str) -> Any:
    """Import a module of ``kernels/triton``; None without Triton."""
    try:
        return import_module(f"lowtide.kernels.triton.{name}")
    except ImportError:
        return None


class Launcher:
    """Launches a kernel whose parameters are tensors, then numbers, then constants.

    Once a kernel is compiled for such arguments, its handle is called with bare addresses.
    """

    def __init__(self, kernel: Any, name: str | None = None) -> None:
        self._kernel = kernel
        self._name = name or kernel.__name__.removeprefix("_")
        self._handles: dict[Any, tuple[Any, Any, Any]] = {}

    def __call__(
        self,
        count: int,
        tensors: tuple[Tensor | None, ...],
        numbers: tuple[float, ...],
        constants: tuple[Any, ...],
        **options: int,
    ) -> None:
        """Start ``count`` programs on the device of the first tensor."""
        if watcher is not None:
            show(self._name, tensors, partial(self, count, tensors, numbers, constants, **options))
            return
        first = tensors[0]
        assert first is not None
        device: Any = first.device.index  # None on a CPU
        if device is not None and device != torch.cuda.current_device():
            with torch.cuda.device(device):
                self(count, tensors, numbers, constants, **options)
            return
        addresses: list[int | None] = []
        key: Any = [device, constants]
        bits = 0
        for tensor in tensors:
            if tensor is None:
                addresses.append(None)
                key.append(None)
            else:
                address = tensor.data_ptr()
                bits |= address
                addresses.append(address)
                key.append(tensor.dtype)
        aligned = bits & 15 == 0  # others are rare, and left to Triton
        if aligned:
            for number in numbers:
                key.append(_specialised(number))
            key = (*key, *options.values())
            handle = self._handles.get(key)
            if handle is not None:
                run, function, metadata = handle
                stream = current_stream(device)
                run(count, 1, 1, stream, function, metadata, None, None, None, *addresses, *numbers, *constants)
                return
        compiled = self._kernel[(count,)](*tensors, *numbers, *constants, **options)
        if compiled is not None and aligned:  # the interpreter compiles nothing
            self._handles[key] = compiled.run, compiled.function, compiled.packed_metadata


def _specialised(number: float) -> int:
    """Return the class of a number for which Triton compiles a kernel: float, 1, multiple of 16, wider than 32 bits."""
    if isinstance(number, float):
        return -1
    return 1 if number == 1 else 2 * (number & 15 == 0) + 4 * (not -(2**31) <= number < 2**31)
