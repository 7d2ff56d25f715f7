"""Ops that can write their result over one of their arguments, element by element."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from lowtide.compat.operators import in_place_form as form_of

_aten: Any = torch.ops.aten


def written_over(node: fx.Node) -> list[fx.Node]:
    """Arguments that an op could overwrite element by element: the first, or either of a sum."""
    if in_place_form(node) is None:
        return []
    commutes = node.target in (_aten.add.Tensor, _aten.mul.Tensor) and not node.kwargs
    values = [value for value in node.args[: 2 if commutes else 1] if isinstance(value, fx.Node)]
    return [value for value in dict.fromkeys(values) if node.args.count(value) == 1]


def in_place_form(node: fx.Node) -> Any:
    """In-place form of a pointwise op, or None."""
    if not is_elementwise(node):
        return None
    if node.target is _aten.mul.Scalar:  # whose own form in place rounds the number to half precision first
        return _aten.mul_.Tensor
    target: Any = node.target
    form = form_of(target)
    return getattr(target.overloadpacket, "grad_input", None) if form is None else form


def lies_like(value: Any, other: Any) -> bool:
    """Whether two tensors have the same dtype, sizes and strides; those of single elements do not count."""
    if not isinstance(value, Tensor) or not isinstance(other, Tensor):
        return False
    strides = zip(value.shape, value.stride(), other.stride(), strict=False)
    return (
        value.dtype == other.dtype
        and value.shape == other.shape
        and all(mine == theirs for size, mine, theirs in strides if size != 1)
    )


def is_elementwise(node: fx.Node) -> bool:
    """Whether each element of the result depends only on the inputs' elements at its position."""
    return torch.Tag.pointwise in getattr(node.target, "tags", ())
