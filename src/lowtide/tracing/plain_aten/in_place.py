"""In-place writes that ATen replaces by copies under a dispatch mode.

ATen asks whether a tensor is "like a subclass" before it writes into one that it just made. Under any dispatch mode the
answer is yes, and it makes another tensor. A trace must do what a plain step does, so the recorder asks here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowtide.compat.operators import in_place_form
from lowtide.tracing.plain_aten.gradient_accumulation import ADD, ADD_IN_PLACE

aten = torch.ops.aten

_PRODUCTS = frozenset({"aten.mm.default", "aten.bmm.default"})

_SPREADS = frozenset(  # gradients of what picks elements, written into zeros
    {
        aten.scatter.src,
        aten.scatter_add.default,
        aten.index_add.default,
        aten.index_put.default,
        aten.index_fill.int_Tensor,
        aten.put.default,
        aten.masked_scatter.default,
    }
)
_ZEROS = frozenset({"aten.zeros.default", "aten.zeros_like.default", "aten.new_zeros.default"})
_LOGIC = (aten.logical_and.default, aten.logical_or.default)
_IN_FORMULA: dict[str, tuple[Any, ...]] = {  # by the name of the autograd node
    "AminmaxBackward0": (ADD,),
    "Atan2Backward0": (aten.masked_fill.Scalar,),
    "BinaryCrossEntropyBackward0": (aten.mul.Tensor,),
    "BinaryCrossEntropyWithLogitsBackward0": (aten.mul.Tensor, aten.sub.Tensor),
    "ClampBackward0": _LOGIC,
    "ClampBackward1": _LOGIC,
    "MaxBackward1": _LOGIC,  # and its like: on a GPU; on a CPU see backward_formulas
    "MinBackward1": _LOGIC,
    "MedianBackward0": _LOGIC,
    "NanmedianBackward0": _LOGIC,
}
DIFFERING = frozenset({ADD, *_SPREADS, *(op for ops in _IN_FORMULA.values() for op in ops)})
_NEG = "aten.neg.default"  # the gradient of a loss's target, which a plain step multiplies out of place as well


def form_after_product(func: Any, args: tuple[Any, ...], made_by: str) -> Any:
    """Return the op that a plain step runs on a tensor that ATen just made, by the op ``made_by``, outside of formulas.

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
    """Return the op that a plain backward pass runs in a node's formula, on a tensor that ``made_by`` made there."""
    writes = made_by in _ZEROS if func in _SPREADS else made_by != _NEG and func in _IN_FORMULA.get(node, ())
    return in_place_form(func) if writes else func
