"""In-place writes that ATen replaces by copies under a dispatch mode.

ATen asks whether a tensor is "like a subclass" before it writes into one that it just made. Under any dispatch mode the
answer is yes, and it makes another tensor. A trace must do what a plain step does, so the recorder asks here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowtide.tracing.plain_aten.gradient_accumulation import ADD, ADD_IN_PLACE

aten = torch.ops.aten

_PRODUCTS = frozenset({"aten.mm.default", "aten.bmm.default"})

_SPREADS = {  # gradients of what picks elements, written into zeros
    aten.scatter.src: aten.scatter_.src,
    aten.scatter_add.default: aten.scatter_add_.default,
    aten.index_add.default: aten.index_add_.default,
    aten.index_put.default: aten.index_put_.default,
    aten.index_fill.int_Tensor: aten.index_fill_.int_Tensor,
    aten.put.default: aten.put_.default,
    aten.masked_scatter.default: aten.masked_scatter_.default,
}
_ZEROS = frozenset({"aten.zeros.default", "aten.zeros_like.default", "aten.new_zeros.default"})
_LOGIC = {aten.logical_and.default: aten.logical_and_.default, aten.logical_or.default: aten.logical_or_.default}
_MUL = {aten.mul.Tensor: aten.mul_.Tensor}
_IN_FORMULA: dict[str, dict[Any, Any]] = {  # by the name of the autograd node
    "AminmaxBackward0": {ADD: ADD_IN_PLACE},
    "Atan2Backward0": {aten.masked_fill.Scalar: aten.masked_fill_.Scalar},
    "BinaryCrossEntropyBackward0": _MUL,
    "BinaryCrossEntropyWithLogitsBackward0": {**_MUL, aten.sub.Tensor: aten.sub_.Tensor},
    "ClampBackward0": _LOGIC,
    "ClampBackward1": _LOGIC,
    "MaxBackward1": _LOGIC,  # and its like: on a GPU, elsewhere see formulas
    "MinBackward1": _LOGIC,
    "MedianBackward0": _LOGIC,
    "NanmedianBackward0": _LOGIC,
}
DIFFERING = frozenset({ADD, *_SPREADS, *(op for table in _IN_FORMULA.values() for op in table)})
_NEG = "aten.neg.default"  # the gradient of a loss's target, which a plain step multiplies out of place as well


def form_after_product(func: Any, args: tuple[Any, ...], made_by: str) -> Any:
    """The op that a plain step runs on a tensor that ATen just made, by the op ``made_by``, outside of formulas.

    Adding the bias of a linear layer, or the mask of an attention, to a product writes into the product.
    """
    fits = (
        func is ADD
        and made_by in _PRODUCTS
        and isinstance(args[1], Tensor)
        and args[0].dtype == args[1].dtype
        and torch.broadcast_shapes(args[0].shape, args[1].shape) == args[0].shape
    )
    return ADD_IN_PLACE if fits else func


def form_in_formula(func: Any, node: str, made_by: str) -> Any:
    """The op that a plain backward pass runs in a node's formula, on a tensor that the op ``made_by`` made there."""
    if func in _SPREADS:
        return _SPREADS[func] if made_by in _ZEROS else func
    return func if made_by == _NEG else _IN_FORMULA.get(node, {}).get(func, func)
