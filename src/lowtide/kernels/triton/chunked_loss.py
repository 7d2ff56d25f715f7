# pyright: basic, reportArgumentType=false, reportGeneralTypeIssues=false, reportCallIssue=false
"""Cross entropy of rows of logits, and its gradient written over them, in Triton.

One program has one row and goes over it twice: first the maximum and Σ exp online (Milakov and Gimelshein, 2018), then
the gradient. Passes over memory: one read and one write. The second read finds the row in the cache. It holds
the rows that run at once, 100 KB each for GPT-2's vocabulary in 16 bits. The formulas are in
``kernels/reference/chunked_loss.py``. Only the last block is loaded with a mask, over the padded row: with one over an
odd vocabulary, Triton loads element by element.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lowtide.kernels.launches import Launcher
from lowtide.kernels.reference.chunked_loss import Rules
from lowtide.kernels.triton.activations import tanh

_BLOCK = 4096
_WARPS = 8


def rows_(
    logits: Tensor, target: Tensor, losses: Tensor, rules: Rules, scale: Tensor | None = None, padding: int = 0
) -> None:
    """Write the losses of rows; with a ``scale``, their gradient times it takes the logits' place.

    Columns are neighbours in memory, and losses too; the distance between rows, and between targets, is free. The last
    ``padding`` columns are no classes: what they hold is not used, and their gradient is 0. A target that is no class
    gives nan.
    """
    assert logits.stride(1) == losses.stride(0) == 1
    count, width = logits.shape
    classes = width - padding
    block = min(_BLOCK, 1 << (width - 1).bit_length())
    assert width <= -(-classes // block) * block
    stride = 0 if scale is None or scale.numel() == 1 else scale.stride(0)
    forms = (scale is not None, rules.weight is not None, rules.smoothing != 0, rules.cap != 0)
    _launch(
        count, (logits, target, losses, scale, rules.weight, rules.weight_sum),
        (logits.stride(0), target.stride(0), stride, classes, width, rules.ignore_index, float(rules.smoothing),
         float(rules.cap)),
        (*forms, classes % block != 0, block),
        num_warps=_WARPS if block == _BLOCK else 4,
    )  # fmt: skip


@triton.jit
def _capped(y, cap, CAPPED: tl.constexpr):
    """The logits of what the product gave."""
    return cap * tanh(y / cap) if CAPPED else y


@triton.jit
def _add(z, k, here, highest, total, spread, weight_ptr, WEIGHTED: tl.constexpr, SMOOTHED: tl.constexpr):
    """One block more: the maximum, Σ exp(z - maximum), Σ w·z."""
    new = tl.maximum(highest, tl.max(z, 0))
    base = tl.where(new == float("-inf"), 0.0, new)  # where all so far is -inf, there is nothing to scale
    total = total * tl.exp(highest - base) + tl.sum(tl.exp(z - base), 0)
    if SMOOTHED:
        known = tl.where(here, z, 0.0)
        if WEIGHTED:
            known *= tl.load(weight_ptr + k, mask=here, other=0.0)
        spread += tl.sum(known, 0)
    return new, total, spread


@triton.jit
def _slope(
    z, k, here, t, highest, factor, even, hit, cap, weight_ptr,
    WEIGHTED: tl.constexpr, SMOOTHED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """The gradient of one block."""
    dz = factor * tl.exp(z - highest)
    if SMOOTHED:
        if WEIGHTED:
            dz -= even * tl.load(weight_ptr + k, mask=here, other=0.0)
        else:
            dz -= even
    dz = tl.where(k == t, dz - hit, dz)
    if CAPPED:
        dz *= 1.0 - (z / cap) * (z / cap)
    return dz


@triton.jit
def _rows(
    logits_ptr, target_ptr, losses_ptr, scale_ptr, weight_ptr, weight_sum_ptr, stride, target_stride, scale_stride,
    classes, width, ignore_index, smoothing, cap,
    GRADIENT: tl.constexpr, WEIGHTED: tl.constexpr, SMOOTHED: tl.constexpr, CAPPED: tl.constexpr, TAIL: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    t = tl.load(target_ptr + row * target_stride)
    k = tl.arange(0, BLOCK)
    whole = classes // BLOCK * BLOCK
    every = k >= 0
    if t == ignore_index:
        tl.store(losses_ptr + row, 0.0)
        if GRADIENT:
            zeros = tl.zeros([BLOCK], logits_ptr.dtype.element_ty)
            for first in range(0, whole, BLOCK):
                tl.store(logits_ptr + first + k, zeros)
            if TAIL:
                tl.store(logits_ptr + whole + k, zeros, mask=whole + k < width)
    else:
        is_class = (t >= 0) & (t < classes)
        z_t = tl.load(logits_ptr + t, mask=is_class, other=float("nan")).to(tl.float32)
        z_t = _capped(z_t, cap, CAPPED)
        mine = 1.0 - smoothing
        all_weights = classes * 1.0
        if WEIGHTED:
            mine *= tl.load(weight_ptr + t, mask=is_class, other=float("nan"))
            all_weights = tl.load(weight_sum_ptr)
        highest = float("-inf")
        total = 0.0
        spread = 0.0
        for first in range(0, whole, BLOCK):
            z = _capped(tl.load(logits_ptr + first + k).to(tl.float32), cap, CAPPED)
            highest, total, spread = _add(z, first + k, every, highest, total, spread, weight_ptr, WEIGHTED, SMOOTHED)
        if TAIL:
            here = whole + k < classes
            z = tl.load(logits_ptr + whole + k, mask=whole + k < width, other=0.0).to(tl.float32)
            z = tl.where(here, _capped(z, cap, CAPPED), float("-inf"))
            highest, total, spread = _add(z, whole + k, here, highest, total, spread, weight_ptr, WEIGHTED, SMOOTHED)
        share = smoothing / classes
        loss = mine * (highest - z_t + tl.log(total))
        if SMOOTHED:
            loss += share * (all_weights * (highest + tl.log(total)) - spread)
        tl.store(losses_ptr + row, loss)
        if GRADIENT:
            tl.debug_barrier()  # every warp has its z_t before one writes over it
            c = tl.load(scale_ptr + row * scale_stride).to(tl.float32)
            c = tl.where(is_class, c, float("nan"))
            factor = c * (mine + share * all_weights) / total
            even = c * share
            hit = c * mine
            for first in range(0, whole, BLOCK):
                z = _capped(tl.load(logits_ptr + first + k).to(tl.float32), cap, CAPPED)
                dz = _slope(
                    z, first + k, every, t, highest, factor, even, hit, cap, weight_ptr, WEIGHTED, SMOOTHED, CAPPED
                )
                tl.store(logits_ptr + first + k, dz.to(logits_ptr.dtype.element_ty))
            if TAIL:
                here = whole + k < classes
                z = tl.load(logits_ptr + whole + k, mask=whole + k < width, other=0.0).to(tl.float32)
                z = tl.where(here, _capped(z, cap, CAPPED), float("-inf"))
                dz = _slope(
                    z, whole + k, here, t, highest, factor, even, hit, cap, weight_ptr, WEIGHTED, SMOOTHED, CAPPED
                )
                dz = tl.where(here, dz, 0.0).to(logits_ptr.dtype.element_ty)
                tl.store(logits_ptr + whole + k, dz, mask=whole + k < width)


_launch = Launcher(_rows, "chunked_loss_rows")
