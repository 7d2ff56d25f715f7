"""Sizes that are symbols, in graphs that are captured for many shapes."""

from __future__ import annotations

import importlib
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lowtide.compat.versions import CAPTURE
from lowtide.errors import TraceError


@CAPTURE
def expression_of(size: torch.SymInt) -> Any:
    """Return the expression of a symbolic size. Equal sizes have equal ones."""
    return size.node.expr


@CAPTURE
def value_of(expression: Any, symbols: Mapping[Any, int]) -> int:
    """Evaluate an expression for values of its symbols. Raises ``TraceError`` if it has others."""
    integer = importlib.import_module("sympy").Integer
    size = expression.xreplace({symbol: integer(value) for symbol, value in symbols.items()})
    if not size.is_Integer:
        raise TraceError(f"The size {size} depends on more than the batch's shape")
    return int(size)


def is_symbol(expression: Any) -> bool:
    """Tell whether an expression is a symbol alone."""
    return bool(expression.is_Symbol)


@contextmanager
def varying(places: Iterable[tuple[Tensor, int]]) -> Generator[None]:
    """Have Dynamo take these dimensions of tensors as symbols where it can, if it captures inside the block."""
    mark = importlib.import_module("torch._dynamo").maybe_mark_dynamic
    places = list(places)
    before = [(tensor, _marks(tensor)) for tensor, _ in places]
    try:
        for tensor, dim in places:
            mark(tensor, dim)
        yield
    finally:
        for tensor, marks in before:
            for name in _marks(tensor):
                delattr(tensor, name)
            vars(tensor).update(marks)


def _marks(tensor: Tensor) -> dict[str, Any]:
    """Return the attributes by which Dynamo and its users mark a tensor."""
    marks = {name: value for name, value in vars(tensor).items() if "_dynamo_" in name}
    return {name: set(value) if isinstance(value, set) else value for name, value in marks.items()}
