"""Few-bit storage of a tensor in groups, rounded at random: the formulas, over ATen.

A group of neighbours is stored as its smallest value l, a step s and codes q of 2, 4 or 8 bits. With L = 2^bits - 1:

    s = (max - l) / L        t = (x - l) / s        q = floor(t + u), u uniform in [0, 1)        x̂ = l + q·s

s is smaller by two units of rounding, so that l + L·s never exceeds the maximum. Otherwise a sigmoid's 1 would become
more, and its slope negative. So E[x̂] = x and E[(x̂ - x)²] = s²·f(1 - f), f the fraction of t (Chen et al., ActNN,
2021). Since u has 16 bits, x̂ is right on average to 2⁻¹⁶ of a step.

A group whose smallest value is 0, as behind a ReLU, gives the code 0 to its zeros alone. The other L codes share the
range from its smallest positive value l, with s = (max - l) / (L - 1). So a zero stays a zero, and nothing else becomes
one. The sign bit of s says so.

A group that holds nan or ±inf, or whose range overflows, is nan when it comes back: its s is nan. One whose s would be
below 2⁻¹¹⁰ counts as constant.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

PARTS = 8  # of a group; a byte holds codes of neighbouring parts, so that no value changes its place in its part
UNIT = 1 << 16  # of the fraction: one over it is the resolution of the random numbers
SMALLEST = 2.0**-110  # UNIT over it is still finite in float32
PHILOX_ROUNDS = 7  # the fewest that pass all known tests (Salmon et al., 2011)

_LEAST = 256  # groups that are worked on at a time; 1/8 of the tensor, if that is more

Noise = Callable[[int, int], Tensor]  # first group, groups -> int32 [groups, group], from 0 to UNIT - 1


def buffer_bytes(numel: int, bits: int, group: int, dtype: torch.dtype) -> int:
    """The stored bytes: l and s of each group, rounded up to 16 bytes, then the codes of whole groups."""
    return header_bytes(numel, group, dtype) + groups_of(numel, group) * group * bits // 8


def header_bytes(numel: int, group: int, dtype: torch.dtype) -> int:
    """Two numbers for each group: float32, or float64 for float64."""
    return -(-2 * groups_of(numel, group) * max(4, dtype.itemsize) // 16) * 16


def groups_of(numel: int, group: int) -> int:
    """Number of groups; the last may be short."""
    return -(-numel // group)


def groups_at_once(numel: int, group: int) -> int:
    """Number of groups in work at a time: temporaries take about 16 bytes for each of their values."""
    groups = groups_of(numel, group)
    return min(groups, max(_LEAST, -(-groups // 8)))


def compress(x: Tensor, bits: int, group: int, noise: Noise) -> Tensor:
    """One buffer of bytes for a flat, contiguous tensor. A short last group is filled up with its last value."""
    buffer = torch.empty(buffer_bytes(x.numel(), bits, group, x.dtype), dtype=torch.uint8, device=x.device)
    low, step, codes = split(buffer, x.numel(), bits, group, x.dtype)
    for first, count in _chunks(x.numel(), group):
        values = x[first * group : (first + count) * group].to(low.dtype)
        missing = count * group - values.numel()
        if missing:
            values = torch.cat([values, values[-1:].expand(missing)])
        here = slice(first, first + count)
        low[here], step[here], codes[here] = _encode(values.view(count, group), bits, noise(first, count))
    return buffer


def decompress(buffer: Tensor, numel: int, dtype: torch.dtype, bits: int, group: int) -> Tensor:
    out = torch.empty(numel, dtype=dtype, device=buffer.device)
    low, step, codes = split(buffer, numel, bits, group, dtype)
    for first, count in _chunks(numel, group):
        here = slice(first, first + count)
        values = _decode(low[here], step[here], codes[here], bits).view(-1)
        part = out[first * group : (first + count) * group]
        part.copy_(values[: part.numel()])
    return out


def split(buffer: Tensor, numel: int, bits: int, group: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """The three parts of a buffer as views: l and s of each group, and its codes, a row for each."""
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    groups = groups_of(numel, group)
    size = groups * wide.itemsize
    codes = buffer[header_bytes(numel, group, dtype) :].view(groups, group * bits // 8)
    return buffer[:size].view(wide), buffer[size : 2 * size].view(wide), codes


def _encode(values: Tensor, bits: int, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    low, high = values.amin(1, keepdim=True), values.amax(1, keepdim=True)
    zeros = (low == 0) & (high > 0)
    positive = torch.where(values > 0, values, torch.inf).amin(1, keepdim=True)
    low = torch.where(zeros, positive, low)
    span = high - low
    whole = span.isfinite()
    top = (1 << bits) - 1 - zeros.to(torch.int32)
    step = span / top * (1 - 2 * torch.finfo(span.dtype).eps)
    step = torch.where(step < SMALLEST, 0, step)
    scale = torch.where(whole & (step > 0), UNIT / step, 0)
    position = (values - low).mul_(scale).clamp_(min=0).masked_fill_(~whole, 0)  # nan as a whole number is anything
    position = position.to(torch.int32).minimum(top * UNIT)
    codes = (position.add_(noise) >> 16).add_(zeros)
    codes.masked_fill_(zeros & (values == 0), 0)
    step = torch.where(whole, step.copysign(torch.where(zeros, -1.0, 1.0)), torch.nan)
    return torch.where(whole, low, 0).squeeze(1), step.squeeze(1), _pack(codes, bits)


def _decode(low: Tensor, step: Tensor, codes: Tensor, bits: int) -> Tensor:
    low, step = low[:, None], step[:, None]
    zeros = step.signbit()
    unpacked = _unpack(codes, bits)
    values = torch.addcmul(low, (unpacked - zeros.to(torch.int32)).to(low.dtype), step.abs())
    return values.masked_fill_(zeros & (unpacked == 0), 0)


def _pack(codes: Tensor, bits: int) -> Tensor:
    count, group = codes.shape
    parts = codes.view(count, bits, PARTS // bits, group // PARTS)  # `bits` bytes for each 8 codes
    packed = parts[:, :, 0]
    for i in range(1, PARTS // bits):
        packed = packed | parts[:, :, i] << (i * bits)
    return packed.reshape(count, -1).to(torch.uint8)


def _unpack(codes: Tensor, bits: int) -> Tensor:
    count, width = codes.shape
    packed = codes.view(count, bits, 1, width // bits)
    shifts = torch.arange(0, 8, bits, dtype=torch.int32, device=codes.device)[:, None]
    return (packed.to(torch.int32) >> shifts & ((1 << bits) - 1)).view(count, -1)


def _chunks(numel: int, group: int) -> list[tuple[int, int]]:
    groups, size = groups_of(numel, group), groups_at_once(numel, group)
    return [(first, min(size, groups - first)) for first in range(0, groups, size)]
