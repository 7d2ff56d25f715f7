"""Composite ops captured as the plain step runs them, in place of torch's decompositions for tracing.

While AOTAutograd traces, torch replaces some composite ops by its own Python code. That code rounds otherwise
(resampling, margin losses) or draws other random numbers (dropout).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lowtide.compat.operators import COMPOSITE_KEYS, forget_kernels, load_decompositions

_aten: Any = torch.ops.aten
_REPLACED = ("upsample_", "_upsample_", "multi_margin_loss", "multilabel_margin_loss_forward")
_lock = threading.Lock()
_users = 0
_removed: list[tuple[Any, Any, Callable[..., Any]]] = []  # op, dispatch key and torch's kernel


@contextmanager
def plain_composites() -> Generator[None]:
    """Trace composite ops by their C++ kernels, which the plain step runs too."""
    global _users
    with _lock:
        _users += 1
        if _users == 1:
            _remove()
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users:
                _restore()


def _remove() -> None:
    load_decompositions()  # registers what is removed here
    names = [name for name in dir(_aten) if name.startswith(_REPLACED)]
    ops = [getattr(getattr(_aten, name), overload) for name in names for overload in getattr(_aten, name).overloads()]
    for op in ops:
        for key in COMPOSITE_KEYS:
            if key in op.py_kernels:
                _removed.append((op, key, op.py_kernels.pop(key)))
                forget_kernels(op)
    dropout = _aten.dropout.default
    for key in COMPOSITE_KEYS:
        fused = dropout.py_kernels[key]
        _removed.append((dropout, key, fused))
        dropout.py_kernels[key] = _dropout_by(fused)
        forget_kernels(dropout)


def _restore() -> None:
    while _removed:
        op, key, kernel = _removed.pop()
        op.py_kernels[key] = kernel
        forget_kernels(op)


def _dropout_by(fused: Callable[..., Any]) -> Callable[..., Any]:
    """Dropout as the plain step's, by the fused op where that gives the same bits.

    The fused op keeps one byte an element. But in half precision it does not round its scale, and at p=1 it draws
    numbers.
    """

    def dropout(input: Tensor, p: float, train: bool | None) -> Tensor:
        if not train or p == 0 or (p < 1 and (input.itemsize >= 4 or input.device.type != "cpu")):
            return fused(input, p, train)
        if p == 1:
            return input * torch.zeros((), dtype=input.dtype, device=input.device)
        if input.is_contiguous():
            return input * torch.empty_like(input).bernoulli_(1 - p).div_(1 - p)
        # Captured, bernoulli draws in another order than in place. The fused mask is laid out as its input.
        _, mask = _aten.native_dropout(input.detach(), p, train)
        return input * mask.to(input.dtype).div_(1 - p)

    return dropout
