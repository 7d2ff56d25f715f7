"""Operators: their schemas, kernels in Python, memory formats, and updates of many tensors at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from lowtide.compat.versions import CAPTURE, TRIED

OpOverload: Any = TRIED.find("torch._ops:OpOverload")
"""One overload of an operator, as graphs call it."""

HigherOrderOperator: Any = TRIED.find("torch._ops:HigherOrderOperator")
"""An operator that takes functions, such as ``torch.cond``."""

schema_of: Callable[[Any], Any] = attrgetter("_schema")
"""Return an overload's schema: name, arguments, results."""

suggest_memory_format: Callable[[Tensor], torch.memory_format] = TRIED.find("torch._prims_common:suggest_memory_format")
"""Return the memory format that a kernel takes from its input."""

elementwise_strides: Callable[..., tuple[int, ...]] = TRIED.find(
    "torch._prims_common:compute_elementwise_output_strides"
)
"""Return the strides of a pointwise op's result."""

foreach_add_: Callable[..., None] = TRIED.find("torch:_foreach_add_")
"""Add to many tensors in a few kernels."""

foreach_addcmul_: Callable[..., None] = TRIED.find("torch:_foreach_addcmul_")
"""Add products to many tensors in a few kernels."""

foreach_lerp_: Callable[..., None] = TRIED.find("torch:_foreach_lerp_")
"""Move many tensors towards others in a few kernels."""

foreach_mul: Callable[..., list[Tensor]] = TRIED.find("torch:_foreach_mul")
"""Multiply many tensors in a few kernels."""

foreach_sub: Callable[..., list[Tensor]] = TRIED.find("torch:_foreach_sub")
"""Subtract many tensors in a few kernels."""


def name_of(op: Any) -> str:
    """Return an operator's name with its namespace, ``aten::add``; "" for what is none."""
    return getattr(getattr(op, "_schema", None), "name", "")


@TRIED
def in_place_form(op: Any) -> Any:
    """Return the overload of an ATen op that writes its result over the first argument, or None."""
    packet = getattr(torch.ops.aten, f"{op._schema.name.removeprefix('aten::')}_", None)
    return getattr(packet, op._schema.overload_name or "default", None)


@CAPTURE
def decompositions_of(op: Any) -> dict[Any, Callable[..., Any]]:
    """Return torch's kernels in Python for a composite op, by dispatch key."""
    import_module("torch._decomp")  # which registers them
    return {key: op.py_kernels[key] for key in _composite_keys() if key in op.py_kernels}


@CAPTURE
def replace_decompositions(kernels: Mapping[Any, Mapping[Any, Callable[..., Any]]]) -> dict[Any, dict[Any, Any]]:
    """Replace the kernels in Python of composite ops, and return theirs. Without any, torch runs the kernel in C++."""
    keys = _composite_keys()
    before: dict[Any, dict[Any, Any]] = {}
    for op, own in kernels.items():
        held = op.py_kernels
        before[op] = {key: held.pop(key) for key in keys if key in held}
        held.update(own)
        op._dispatch_cache.clear()
    return before


def _composite_keys() -> tuple[Any, ...]:
    keys = torch._C.DispatchKey
    return keys.Autograd, keys.CompositeImplicitAutograd
