"""Backward formulas that ATen computes another way under a dispatch mode.

A plain step inspects values (is a factor zero, is a maximum nan) and then takes a short path with other temporaries.
Each formula here runs the short path's ops on stand-ins, in the plain step's order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lowtide.compat.autograd import input_metadata, saved_value

aten = torch.ops.aten

PRODUCTS = frozenset({aten.prod.default, aten.prod.dim_int, aten.cumprod.default})  # whose zeros decide the formula

Run = Callable[..., Any]  # an op and its arguments: runs and records it


def formula_of(node: Any, *, fake: bool, zeros: bool) -> Callable[[Any, Run], None] | None:
    """Return the formula of a plain step for an autograd node, where another runs under a mode.

    ``zeros`` tells that it is the node of a product with a zero.
    """
    if zeros:
        is_masked = node.name() == "CumprodBackward0" and torch.__version__ < "2.13"
        return _cumprod_of_zeros if is_masked else None
    formula = _FORMULAS.get(node.name())
    if formula is _share_evenly and input_metadata(node)[0].device.type != "cpu":
        return None
    if formula is _masked_fill and (fake or node.next_functions[1][0] is None):  # a fake mask does not tell how many
        return None
    return formula


def _share_evenly(node: Any, run: Run) -> None:
    """``x.max()`` and its like: equal shares for all elements that are the maximum."""
    grad, x = _gradient(node), _input(node)
    run(aten.isnan.default, grad)
    mask = run(aten.eq.Tensor, x, grad)
    zeros = run(aten.new_zeros.default, grad, x.shape)
    share = run(aten.div.Tensor, grad, run(aten.sum.default, mask))
    run(aten.masked_fill_.Tensor, zeros, mask, share)


def _prod(node: Any, run: Run) -> None:
    """``x.prod()``, no factor of which is zero."""
    grad, x = _gradient(node), _input(node)
    run(aten.eq.Scalar, x, 0)
    quotient = run(aten.div.Tensor, grad, x)
    run(aten.mul.Tensor, grad, quotient)


def _prod_along(node: Any, run: Run) -> None:
    """``x.prod(dim)``, no factor of which is zero."""
    grad, x, dim = _gradient(node), _input(node), _dim(node)
    if grad.ndim < x.ndim:
        grad = grad.unsqueeze(dim)
    is_zero = run(aten.eq.Scalar, x, 0)
    zeros = run(aten.sum.dim_IntList, is_zero, [dim], True)
    run(aten.sum.default, zeros)
    quotient = run(aten.div.Tensor, grad, x)
    run(aten.mul.Tensor, grad, quotient)


def _cumprod(node: Any, run: Run) -> None:
    """``x.cumprod(dim)``, no factor of which is zero."""
    grad, x, dim = _gradient(node), _input(node), _dim(node)
    if x.numel() <= 1 or x.shape[dim] == 1:
        return
    product = run(aten.mul.Tensor, grad, grad)
    is_zero = run(aten.eq.Scalar, x, 0)
    run(aten.any.default, is_zero)
    reversed_sum = _reversed_sum(product, dim, run)
    run(aten.div.Tensor, reversed_sum, x)


def _cumprod_of_zeros(node: Any, run: Run) -> None:
    """``x.cumprod(dim)`` with zeros, by torch 2.11's masks of what comes before each first zero, and of those zeros.

    The stand-ins have no zeros, so that masks select all: an upper bound.
    """
    grad, x, dim = _gradient(node), _input(node), _dim(node)
    product = run(aten.mul.Tensor, grad, grad)
    is_zero = run(aten.eq.Scalar, x, 0)
    out = run(aten.zeros_like.default, product)
    count = run(aten.cumsum.default, is_zero, dim)
    before = run(aten.eq.Scalar, count, 0)
    terms = run(aten.masked_fill.Scalar, product, run(aten.bitwise_not.default, before), 0)
    run(aten.masked_scatter_.default, out, before, run(aten.masked_select.default, terms, before))
    after = [run(aten.eq.Scalar, count, number) for number in (1, 1, 2, 2)]
    filled = [run(aten.masked_fill.Scalar, each, mask, 0) for each, mask in zip((x, grad), after, strict=False)]
    terms = run(aten.cumprod.default, filled[0], dim)
    total = run(aten.sum.dim_IntList, terms, [dim], True)
    run(aten.masked_scatter_.default, out, before, run(aten.masked_select.default, total, before))


def _masked_fill(node: Any, run: Run) -> None:
    """``x.masked_fill(mask, value)`` with a gradient of the value: the sum over the mask."""
    grad, mask = _gradient(node), saved_value(node, "mask")
    _of_input = run(aten.masked_fill.Scalar, grad, mask, 0) if node.next_functions[0][0] is not None else None
    run(aten.sum.default, run(aten.masked_select.default, grad, mask))


def _reversed_sum(product: Tensor, dim: int, run: Run) -> Tensor:
    flipped = run(aten.flip.default, product, [dim])
    summed = run(aten.cumsum.default, flipped, dim)
    return run(aten.flip.default, summed, [dim])


def _gradient(node: Any) -> Tensor:
    return _stand_in(input_metadata(node)[0])


def _input(node: Any) -> Tensor:
    target, slot = node.next_functions[0]
    return _stand_in(input_metadata(target)[slot])


def _stand_in(metadata: Any) -> Tensor:
    """A tensor of one element, shown in a shape."""
    return torch.ones((), dtype=metadata.dtype, device=metadata.device).expand(metadata.shape)


def _dim(node: Any) -> int:
    dim: int = saved_value(node, "dim")
    return dim - 2**64 if dim >= 2**63 else dim  # autograd shows it without a sign


_FORMULAS: dict[str, Callable[[Any, Run], None]] = {
    "MaxBackward1": _share_evenly,
    "MinBackward1": _share_evenly,
    "MedianBackward0": _share_evenly,
    "NanmedianBackward0": _share_evenly,
    "ProdBackward0": _prod,
    "ProdBackward1": _prod_along,
    "CumprodBackward0": _cumprod,
    "MaskedFillBackward1": _masked_fill,
}
