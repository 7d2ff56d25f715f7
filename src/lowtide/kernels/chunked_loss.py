"""The loss of a chunk of logits by the kernel that fits, Triton's on a GPU, ATen's elsewhere; sums over chunks."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from lowtide.compat.dispatch import without_dispatch
from lowtide.kernels import launches
from lowtide.kernels.reference import chunked_loss as reference
from lowtide.kernels.reference.chunked_loss import Rules, wide

__all__ = ["Rules", "add_product", "padded", "padding", "rows_", "wide"]

_MULTIPLE = 64  # of classes, on a GPU


def rows_(
    logits: Tensor, target: Tensor, losses: Tensor, rules: Rules, scale: Tensor | None = None, padding: int = 0
) -> None:
    """Write the losses of rows; with a ``scale``, their gradient times it takes the logits' place.

    The last ``padding`` columns are not classes: their values are ignored, and their gradient is 0.
    """
    fast = launches.fast_kernels("chunked_loss", logits)
    if fast is not None and logits.numel():
        fast.rows_(logits, target, losses, rules, scale, padding)
        return
    try:
        reference.rows_(logits, target, losses, rules, scale, padding)
    except RuntimeError:
        outside = (target != rules.ignore_index) & ((target < 0) | (target >= logits.shape[1] - padding))
        if logits.is_cuda or not outside.any():
            raise
        raise IndexError(f"Target {int(target[outside][0])} is out of bounds.") from None  # as torch says it


def padding(classes: int, device: str) -> int:
    """Number of classes to add as padding: on a GPU the matrix products of an odd number are slow.

    >>> padding(50257, "cuda"), padding(50304, "cuda"), padding(50257, "cpu")
    (47, 0, 0)
    """
    return -classes % _MULTIPLE if device == "cuda" else 0


def padded(parameter: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """The parameter in this dtype, with so many rows of zeros after it."""
    if not count:
        return parameter.to(dtype)
    wider = parameter.new_empty(len(parameter) + count, *parameter.shape[1:], dtype=dtype)
    wider[: len(parameter)].copy_(parameter)
    wider[len(parameter) :].zero_()
    return wider


def add_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """``total + a @ b``, in place, in 32 bits at least: a sum over chunks that was rounded to 16 would show it."""
    if wide(a.dtype) == a.dtype:
        return torch.mm(a, b) if total is None else total.addmm_(a, b)
    if a.is_cuda and _adds_in_float32(a.device):
        if total is None:
            return torch.mm(a, b, out_dtype=torch.float32)
        return torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    if a.dtype is torch.float16:  # a sum over rows soon exceeds 65504, which only its mean stays below
        a, b = a.float(), b.float()
    product = torch.mm(a, b)
    return product.float() if total is None else total.add_(product)


@cache
def _adds_in_float32(device: torch.device) -> bool:
    """Tell whether torch adds a product of 16-bit matrices to a 32-bit one; an absent GPU is assumed to."""
    if not torch.cuda.is_available():
        return True
    with without_dispatch():
        try:
            total, a = torch.zeros(8, 8, device=device), torch.zeros(8, 8, dtype=torch.bfloat16, device=device)
            torch.mm(a, a, out_dtype=torch.float32)
            torch.addmm(total, a, a, out_dtype=torch.float32, out=total)
        except (RuntimeError, TypeError):
            return False
    return True
