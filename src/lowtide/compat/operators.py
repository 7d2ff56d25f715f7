"""Operators: their schemas, kernels in Python, memory formats, and updates of many tensors at once."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, _ops, _prims_common

_c: Any = torch._C
_torch: Any = torch

OpOverload = _ops.OpOverload
"""One overload of an operator, as graphs call it."""

HigherOrderOperator = _ops.HigherOrderOperator
"""An operator that takes functions, such as ``torch.cond``."""

schema_of: Callable[[Any], Any] = attrgetter("_schema")
"""Return an overload's schema: name, arguments, results."""

suggest_memory_format: Callable[[Tensor], torch.memory_format] = _prims_common.suggest_memory_format
"""Return the memory format that a kernel takes from its input."""

elementwise_strides: Callable[..., tuple[int, ...]] = _prims_common.compute_elementwise_output_strides
"""Return the strides of a pointwise op's result."""

COMPOSITE_KEYS = (_c.DispatchKey.Autograd, _c.DispatchKey.CompositeImplicitAutograd)
"""The keys under which torch registers decompositions in Python."""

foreach_add_: Callable[..., None] = _torch._foreach_add_
"""Add to many tensors in a few kernels."""

foreach_addcmul_: Callable[..., None] = _torch._foreach_addcmul_
"""Add products to many tensors in a few kernels."""

foreach_lerp_: Callable[..., None] = _torch._foreach_lerp_
"""Move many tensors towards others in a few kernels."""

foreach_mul: Callable[..., list[Tensor]] = _torch._foreach_mul
"""Multiply many tensors in a few kernels."""

foreach_norm: Callable[..., list[Tensor]] = _torch._foreach_norm
"""Return the norms of many tensors in a few kernels."""

foreach_sub: Callable[..., list[Tensor]] = _torch._foreach_sub
"""Subtract many tensors in a few kernels."""


def name_of(op: Any) -> str:
    """Return an operator's name with its namespace, ``aten::add``; "" for what is none."""
    return getattr(getattr(op, "_schema", None), "name", "")


def in_place_form(op: Any) -> Any:
    """Return the overload of an ATen op that writes its result over the first argument, or None."""
    packet = getattr(torch.ops.aten, f"{op._schema.name.removeprefix('aten::')}_", None)
    return getattr(packet, op._schema.overload_name or "default", None)


def load_decompositions() -> None:
    """Register torch's decompositions in Python, which are imported on demand."""
    import_module("torch._decomp")


def forget_kernels(op: Any) -> None:
    """Have an overload look its kernels up again, after ``py_kernels`` was changed."""
    op._dispatch_cache.clear()
