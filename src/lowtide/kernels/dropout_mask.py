"""Dropout masks from explicit seeds: the same mask op by op, compiled, and on any device.

Element ``i`` is kept where a hash of ``i`` and a seed of two 32-bit words is at least ``p``. A step holds the seed.
It computes the mask wherever it reads it. The hash is a multiply-xorshift mix with the constants of C. Wellons'
"lowbias32". The first word of the seed goes in before one multiplication, the second before two others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

MOST_ELEMENTS = 2**31 - 1  # that a mask can number

_CHUNK = 2**20  # elements at a time: op by op, a hash takes several tensors of 32 bits


@torch.library.custom_op("lowtide::dropout_mask", mutates_args=())
def dropout_mask(seed: Tensor, size: Sequence[int], p: float) -> Tensor:
    """Return the mask of kept elements; ``seed`` holds two int32 words or more."""
    count = math.prod(size)
    starts = range(0, count, _CHUNK)
    parts = [is_kept(torch.arange(at, min(at + _CHUNK, count), dtype=torch.int32, device=seed.device), seed, p)
             for at in starts]  # fmt: skip
    return torch.cat(parts).view(size) if parts else torch.empty(size, dtype=torch.bool, device=seed.device)


@dropout_mask.register_fake
def _(seed: Tensor, size: Sequence[int], p: float) -> Tensor:
    return torch.empty(size, dtype=torch.bool, device=seed.device)


def is_kept(index: Tensor, seed: Tensor, p: float) -> Tensor:
    """Tell whether elements at these places are kept: pure integer ops, which a compiler fuses into their reader."""
    x = index ^ seed[0]
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
    x = x + seed[1]
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
    x = (x ^ ((x >> 15) & 0x1FFFF)) * (0x846CA68B - 2**32)
    x = x ^ ((x >> 16) & 0xFFFF)
    return ((x >> 8) & 0xFFFFFF) >= round(p * 2**24)


def decomposed(seed: Tensor, size: Sequence[int], p: float) -> Tensor:
    """The mask as ops that a compiler takes apart."""
    index = torch.arange(math.prod(size), dtype=torch.int32, device=seed.device)
    return is_kept(index, seed, p).view(size)
