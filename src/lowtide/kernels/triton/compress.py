# pyright: basic, reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
"""Few-bit storage of a tensor in groups, in Triton: one launch each way, every byte read once and written once.

A program holds a few groups in registers, so the smallest value, the step and the codes of a group come from one read.
The floor is (value bytes + bits / 8 + 8 / group) for each value over the bandwidth, both ways.

A group is worked on in 8 parts, each a block of its own. A byte takes its codes from neighbouring parts, so packing
moves nothing between threads. One call of Philox4x32 has 16 random bits for a value of each part.
``kernels.reference.compress`` says what is stored, and is the truth.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowtide.kernels.launches import Launcher
from lowtide.kernels.reference.compress import PHILOX_ROUNDS, SMALLEST, buffer_bytes, groups_of

_VALUES = 4096  # that a program works on
_WARPS = 4


def compress(x: Tensor, bits: int, group: int, seed: Tensor, call: int) -> Tensor:
    """One buffer of bytes for a flat, contiguous tensor; ``seed``, an int64 on its device, and ``call`` are added."""
    buffer = torch.empty(buffer_bytes(x.numel(), bits, group, x.dtype), dtype=torch.uint8, device=x.device)
    _launch(_compress_launch, (x, buffer, seed), (x.numel(), call), bits, group)
    return buffer


def decompress(buffer: Tensor, numel: int, dtype: torch.dtype, bits: int, group: int) -> Tensor:
    out = torch.empty(numel, dtype=dtype, device=buffer.device)
    _launch(_decompress_launch, (buffer, out), (numel,), bits, group)
    return out


def _launch(launcher: Launcher, tensors: tuple[Tensor, ...], numbers: tuple[int, ...], bits: int, group: int) -> None:
    rows, count = max(1, _VALUES // group), groups_of(numbers[0], group)
    has_tail = numbers[0] % (rows * group) != 0
    launcher(-(-count // rows), tensors, (*numbers, count), (bits, group, rows, has_tail), num_warps=_WARPS)


# -- programs --------------------------------------------------------------------------------------------

_SMALLEST = tl.constexpr(SMALLEST)
_ROUNDS = tl.constexpr(PHILOX_ROUNDS)


@triton.jit
def _places(count, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """Return the groups of this program, whether they exist, and where each one's first part lies in the tensor."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    first = rows[:, None] * GROUP + tl.arange(0, GROUP // 8)[None, :]
    return rows, rows < count, first


@triton.jit
def _code(x, low, scale, top, zeros, noise):
    """floor(t + u) in whole numbers: t in units of 2⁻¹⁶, u one of 2¹⁶ of them. No rounding can be fused."""
    position = tl.minimum(tl.maximum((x - low) * scale, 0.0).to(tl.int32), top)
    code = ((position + noise.to(tl.int32)) >> 16) + zeros
    return tl.where((zeros == 1) & (x == 0), 0, code)


@triton.jit
def _load(x_ptr, at, n, last, TAIL: tl.constexpr):
    x = tl.load(x_ptr + at, mask=at < n, other=last) if TAIL else tl.load(x_ptr + at)
    return x.to(tl.float32)


@triton.jit
def _store(ptr, value, mask, TAIL: tl.constexpr):
    """Without a mask where there need not be one: with it, Triton stores value by value."""
    if TAIL:
        tl.store(ptr, value.to(ptr.dtype.element_ty), mask=mask)
    else:
        tl.store(ptr, value.to(ptr.dtype.element_ty))


@triton.jit
def _positive(x):
    return tl.where(x > 0, x, float("inf"))


@triton.jit
def _least(a, b, c, d):
    return tl.minimum(tl.minimum(a, b), tl.minimum(c, d))


@triton.jit
def _most(a, b, c, d):
    return tl.maximum(tl.maximum(a, b), tl.maximum(c, d))


@triton.jit
def _any_nan(a, b, c, d):
    return ((a != a) | (b != b) | (c != c) | (d != d)).to(tl.int32)


@triton.jit(do_not_specialize=["n", "call", "count"])  # a 1 would be no tensor
def _compress(
    x_ptr, buffer_ptr, seed_ptr, n, call, count,
    BITS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    PART: tl.constexpr = GROUP // 8
    rows, there, at = _places(count, GROUP, ROWS)
    last = tl.load(x_ptr + (n - 1).to(tl.int64))
    x0 = _load(x_ptr, at, n, last, TAIL)
    x1 = _load(x_ptr, at + PART, n, last, TAIL)
    x2 = _load(x_ptr, at + 2 * PART, n, last, TAIL)
    x3 = _load(x_ptr, at + 3 * PART, n, last, TAIL)
    x4 = _load(x_ptr, at + 4 * PART, n, last, TAIL)
    x5 = _load(x_ptr, at + 5 * PART, n, last, TAIL)
    x6 = _load(x_ptr, at + 6 * PART, n, last, TAIL)
    x7 = _load(x_ptr, at + 7 * PART, n, last, TAIL)

    low = tl.minimum(_least(x0, x1, x2, x3), _least(x4, x5, x6, x7))
    high = tl.maximum(_most(x0, x1, x2, x3), _most(x4, x5, x6, x7))
    positive = tl.minimum(
        _least(_positive(x0), _positive(x1), _positive(x2), _positive(x3)),
        _least(_positive(x4), _positive(x5), _positive(x6), _positive(x7)),
    )
    nan = _any_nan(x0, x1, x2, x3) | _any_nan(x4, x5, x6, x7)
    low, high, positive, nan = tl.min(low, 1), tl.max(high, 1), tl.min(positive, 1), tl.max(nan, 1)

    zeros = (low == 0) & (high > 0)
    low = tl.where(zeros, positive, low)
    finite = (nan == 0) & (low > float("-inf")) & (high < float("inf"))
    low, high = tl.where(finite, low, 0.0), tl.where(finite, high, 0.0)
    span = high - low
    whole = finite & (span < float("inf"))
    steps = (1 << BITS) - 1 - zeros.to(tl.int32)
    step = tl.math.div_rn(tl.where(whole, span, 0.0), steps.to(tl.float32)) * (1 - 2.0**-22)
    step = tl.where(step < _SMALLEST, 0.0, step)
    units = tl.full([ROWS], 65536.0, tl.float32)
    scale = tl.where(step > 0, tl.math.div_rn(units, tl.where(step > 0, step, 1.0)), 0.0)
    low = tl.where(whole, low, 0.0)

    stats_ptr = buffer_ptr.to(tl.pointer_type(tl.int32))
    signed = step.to(tl.int32, bitcast=True) | (zeros.to(tl.int32) << 31)  # -s would lose the sign of 0
    _store(stats_ptr + rows, low.to(tl.int32, bitcast=True), there, TAIL)
    _store(stats_ptr + count + rows, tl.where(whole, signed, 0x7FC00000), there, TAIL)

    seed = tl.load(seed_ptr) + call
    offset = rows[:, None] * PART + tl.arange(0, PART)[None, :]
    counter, rest = offset.to(tl.uint32), (offset >> 32).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, counter, rest, rest * 0, rest * 0, _ROUNDS)

    low, scale, zeros = low[:, None], scale[:, None], zeros.to(tl.int32)[:, None]
    top = (steps << 16)[:, None]
    whole = whole[:, None]
    c0 = _code(tl.where(whole, x0, 0.0), low, scale, top, zeros, w0 & 0xFFFF)
    c1 = _code(tl.where(whole, x1, 0.0), low, scale, top, zeros, w0 >> 16)
    c2 = _code(tl.where(whole, x2, 0.0), low, scale, top, zeros, w1 & 0xFFFF)
    c3 = _code(tl.where(whole, x3, 0.0), low, scale, top, zeros, w1 >> 16)
    c4 = _code(tl.where(whole, x4, 0.0), low, scale, top, zeros, w2 & 0xFFFF)
    c5 = _code(tl.where(whole, x5, 0.0), low, scale, top, zeros, w2 >> 16)
    c6 = _code(tl.where(whole, x6, 0.0), low, scale, top, zeros, w3 & 0xFFFF)
    c7 = _code(tl.where(whole, x7, 0.0), low, scale, top, zeros, w3 >> 16)

    codes_ptr = buffer_ptr + _header(count) + rows[:, None] * (PART * BITS) + tl.arange(0, PART)[None, :]
    mask = there[:, None]
    if BITS == 2:
        _store(codes_ptr, c0 | c1 << 2 | c2 << 4 | c3 << 6, mask, TAIL)
        _store(codes_ptr + PART, c4 | c5 << 2 | c6 << 4 | c7 << 6, mask, TAIL)
    elif BITS == 4:
        _store(codes_ptr, c0 | c1 << 4, mask, TAIL)
        _store(codes_ptr + PART, c2 | c3 << 4, mask, TAIL)
        _store(codes_ptr + 2 * PART, c4 | c5 << 4, mask, TAIL)
        _store(codes_ptr + 3 * PART, c6 | c7 << 4, mask, TAIL)
    else:
        _store(codes_ptr, c0, mask, TAIL)
        _store(codes_ptr + PART, c1, mask, TAIL)
        _store(codes_ptr + 2 * PART, c2, mask, TAIL)
        _store(codes_ptr + 3 * PART, c3, mask, TAIL)
        _store(codes_ptr + 4 * PART, c4, mask, TAIL)
        _store(codes_ptr + 5 * PART, c5, mask, TAIL)
        _store(codes_ptr + 6 * PART, c6, mask, TAIL)
        _store(codes_ptr + 7 * PART, c7, mask, TAIL)


@triton.jit
def _header(count):
    return (count.to(tl.int64) * 8 + 15) // 16 * 16


@triton.jit(do_not_specialize=["n", "count"])
def _decompress(
    buffer_ptr, out_ptr, n, count, BITS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, TAIL: tl.constexpr
):
    PART: tl.constexpr = GROUP // 8
    rows, there, at = _places(count, GROUP, ROWS)
    stats_ptr = buffer_ptr.to(tl.pointer_type(tl.int32))
    low = tl.load(stats_ptr + rows, mask=there, other=0).to(tl.float32, bitcast=True)[:, None]
    signed = tl.load(stats_ptr + count + rows, mask=there, other=0)
    zeros = (signed < 0).to(tl.int32)[:, None]
    step = (signed & 0x7FFFFFFF).to(tl.float32, bitcast=True)[:, None]
    codes_ptr = buffer_ptr + _header(count) + rows[:, None] * (PART * BITS) + tl.arange(0, PART)[None, :]
    for byte in tl.static_range(BITS):
        packed = tl.load(codes_ptr + byte * PART, mask=there[:, None], other=0).to(tl.int32)
        for i in tl.static_range(8 // BITS):
            code = (packed >> (i * BITS)) & ((1 << BITS) - 1)
            value = low + (code - zeros).to(tl.float32) * step
            value = tl.where((zeros == 1) & (code == 0), 0.0, value)
            here = at + (byte * (8 // BITS) + i) * PART
            _store(out_ptr + here, value, here < n, TAIL)


_compress_launch = Launcher(_compress)
_decompress_launch = Launcher(_decompress)
