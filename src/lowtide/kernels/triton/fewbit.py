# pyright: basic, reportArgumentType=false, reportGeneralTypeIssues=false
"""Few-bit backward in Triton: codes of 8 neighbours are found and packed by one thread, and unpacked by one.

Forward with the activation: read x, write y and b/8 bytes per element; without: read x, write the codes. Backward: read
dy and the codes, write dx. All of them are streams, one pass each; tensors may lie in memory in any dense order.

A table of up to 4 levels or 7 boundaries is in registers, where selections are faster on an H200. A larger one is in
memory, where all threads share its loads.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowtide.compat.dispatch import without_modes
from lowtide.compat.fake import FakeTensor, FakeTensorMode
from lowtide.kernels.activations import Activation
from lowtide.kernels.launches import Launcher
from lowtide.kernels.reference.fewbit import Codebook, constants, packed_bytes
from lowtide.kernels.triton.activations import CODES, GELU_CUDA13, GELU_TANH, phi

_GROUPS = 256  # of 8 elements, for each program
_WARPS = 4
_TABLE = -1  # in place of a gate's kind
_NO_ACTIVATION = -1


def activations(activation: Activation) -> tuple[int, ...]:
    """The ways in which ``forward`` can compute it. They differ in last bits."""
    if activation.function is not None or activation.name not in CODES:
        return ()
    if activation.name == "gelu":
        return (GELU_TANH,) if activation.numbers[0] else (GELU_CUDA13, CODES["gelu"])
    return (CODES[activation.name],)


def forward(x: Tensor, book: Codebook, activation: int) -> tuple[Tensor, Tensor]:
    """Y and the codes of a dense x, in one pass. Whether y has torch's bits is for the caller to find out."""
    y = torch.empty_like(x)
    return y, _encode(x, y, book, activation)


def encode(x: Tensor, book: Codebook, *, rounded: bool = False) -> Tensor:
    """The codes of a dense x. ``rounded``: a gate's ends are first rounded to the dtype, as some of torch's are."""
    return _encode(x, None, book, _NO_ACTIVATION, rounded=rounded)


def _encode(x: Tensor, y: Tensor | None, book: Codebook, act: int, *, rounded: bool = False) -> Tensor:
    count, bits = x.numel(), book.bits
    codes = torch.empty(packed_bytes(count, bits), dtype=torch.uint8, device=x.device)
    kind, low, high = _TABLE, 0.0, 0.0
    if book.activation.is_gate:
        gate = book.activation.gate
        kind, low, high = gate.kind, gate.low, gate.high
        if rounded:
            low, high = torch.tensor([low, high], dtype=x.dtype).tolist()
    a, b = (*book.activation.numbers, 0.0, 0.0)[:2]
    _encode_launch(
        -(-count // (8 * _GROUPS)), (x, y, codes, _table(book, x, 0)),
        (count, count // 8, float(low), float(high), float(a), float(b)),
        (bits, kind, act, count % 8 != 0, count >= 2**31, _GROUPS), num_warps=_WARPS,
    )  # fmt: skip
    return codes


def decode(dy: Tensor, codes: Tensor, book: Codebook) -> Tensor:
    """Dx of a dense dy that lies in memory as the coded x did."""
    dx = torch.empty_like(dy)
    count, kind, on, off = dy.numel(), _TABLE, 0.0, 0.0
    if book.activation.is_gate:
        gate = book.activation.gate
        kind, on, off = gate.kind, gate.on, gate.off
    _decode_launch(
        -(-count // (8 * _GROUPS)), (dy, codes, dx, _table(book, dy, 1)), (count, count // 8, float(on), float(off)),
        (book.bits, kind, off == 0, count % 8 != 0, count >= 2**31, _GROUPS), num_warps=_WARPS,
    )  # fmt: skip
    return dx


def _table(book: Codebook, x: Tensor, which: int) -> Tensor | None:
    """Boundaries or levels; a gate has none."""
    if book.activation.is_gate:
        return None
    if not isinstance(x, FakeTensor):
        return constants(book, x.device, torch.float32)[which]
    known = _fake_tables.setdefault(x.fake_mode, {})
    if (book, x.device) not in known:
        with without_modes():
            sizes = [torch.empty(len(values), device="meta") for values in (book.boundaries, book.levels)]
            known[book, x.device] = [FakeTensor(x.fake_mode, size, x.device) for size in sizes]
    return known[book, x.device][which]


# Tables of predicted steps, which hold as many as real ones.
_fake_tables: WeakKeyDictionary[FakeTensorMode, dict[tuple[Codebook, torch.device], list[FakeTensor]]] = (
    WeakKeyDictionary()
)


# -- the programs ----------------------------------------------------------------------------------------


@triton.jit
def _places(WIDE: tl.constexpr, GROUPS: tl.constexpr):
    """The groups of a program, and the elements of each."""
    first = tl.program_id(0)
    if WIDE:
        first = first.to(tl.int64)
    group = first * GROUPS + tl.arange(0, GROUPS)
    return group, group[:, None] * 8 + tl.arange(0, 8)[None, :]


@triton.jit
def _byte_at(group, q, N, G, BITS: tl.constexpr, TAIL: tl.constexpr):
    """Offset of byte q of the groups' words, and whether it exists."""
    at = q * G + group
    there = group < G
    if TAIL:
        at = tl.where(there, at, BITS * G + q)
        there = there | ((group == G) & (BITS * (N - 8 * group) > 8 * q))
    return at, there


@triton.jit
def _search(x, table, BITS: tl.constexpr):
    """The code of each x, by halves. Up to 8 codes the boundaries are in registers; more are faster loaded, from a few
    lines of cache that all share.
    """
    H: tl.constexpr = 2**BITS
    if BITS > 3:
        code = tl.zeros_like(x).to(tl.int32)
        for i in tl.static_range(BITS):
            boundary = tl.load(table + code + (2 ** (BITS - 1 - i) - 1))
            code += tl.where(x < boundary, 0, 2 ** (BITS - 1 - i))
    else:
        below = x < tl.load(table + H // 2 - 1)
        code = tl.where(below, 0, H // 2)
        if BITS >= 2:
            below2 = x < tl.where(below, tl.load(table + H // 4 - 1), tl.load(table + 3 * H // 4 - 1))
            code += tl.where(below2, 0, H // 4)
        if BITS == 3:
            low = tl.where(below2, tl.load(table), tl.load(table + 2))
            high = tl.where(below2, tl.load(table + 4), tl.load(table + 6))
            code += tl.where(x < tl.where(below, low, high), 0, 1)
    return code


@triton.jit
def _level(code, table, BITS: tl.constexpr):
    """The level of each code: selected among registers up to 4, else from one or a few lines of cache."""
    if BITS > 2:
        return tl.load(table + code)
    odd = (code & 1) != 0
    level = tl.where(odd, tl.load(table + 1), tl.load(table))
    if BITS == 2:
        level = tl.where((code & 2) != 0, tl.where(odd, tl.load(table + 3), tl.load(table + 2)), level)
    return level


@triton.jit
def _open(x, low, high, KIND: tl.constexpr):
    """Tell whether a gate is open at x. A bound of NaN is no bound."""
    below_high = (x < high) | (high != high)
    if KIND == 0:
        return (x > low) & below_high
    elif KIND == 1:
        return ((x > low) & below_high) | (x != x)
    else:
        return (x < low) | (x > high) | (x != x)


@triton.jit
def fewbit_encode(
    x_ptr, y_ptr, codes_ptr, table, N, G, low, high, a, b,
    BITS: tl.constexpr, KIND: tl.constexpr, ACT: tl.constexpr, TAIL: tl.constexpr, WIDE: tl.constexpr,
    GROUPS: tl.constexpr,
):  # fmt: skip
    """Codes of x, and y = φ(x) where ACT says which φ."""
    group, at = _places(WIDE, GROUPS)
    if WIDE:
        G = G.to(tl.int64)
    there = at < N
    x = tl.load(x_ptr + at, mask=there, other=0.0).to(tl.float32)
    if ACT >= 0:
        tl.store(y_ptr + at, phi(x, a, b, ACT).to(y_ptr.dtype.element_ty), mask=there)
    code = _search(x, table, BITS) if KIND < 0 else _open(x, low, high, KIND).to(tl.int32)
    if TAIL:
        code = tl.where(there, code, 0)
    shifts = tl.arange(0, 8)[None, :] * BITS
    if BITS > 4:
        code, shifts = code.to(tl.int64), shifts.to(tl.int64)
    word = tl.sum(code << shifts, 1)
    for q in tl.static_range(BITS):
        byte_at, known = _byte_at(group, q, N, G, BITS, TAIL)
        tl.store(codes_ptr + byte_at, ((word >> (8 * q)) & 255).to(tl.uint8), mask=known)


@triton.jit
def fewbit_decode(
    dy_ptr, codes_ptr, dx_ptr, table, N, G, on, off,
    BITS: tl.constexpr, KIND: tl.constexpr, OFF_IS_0: tl.constexpr, TAIL: tl.constexpr, WIDE: tl.constexpr,
    GROUPS: tl.constexpr,
):  # fmt: skip
    """The gradient dx = dy·slope. If a closed gate has the slope 0, dx is 0 for any dy."""
    group, at = _places(WIDE, GROUPS)
    if WIDE:
        G = G.to(tl.int64)
    there = at < N
    dy = tl.load(dy_ptr + at, mask=there, other=0.0).to(tl.float32)
    byte_at, known = _byte_at(group, 0, N, G, BITS, TAIL)
    word = tl.load(codes_ptr + byte_at, mask=known, other=0).to(tl.int32)
    if BITS > 4:
        word = word.to(tl.int64)
    for q in tl.static_range(1, BITS):
        byte_at, known = _byte_at(group, q, N, G, BITS, TAIL)
        word |= tl.load(codes_ptr + byte_at, mask=known, other=0).to(word.dtype) << (8 * q)
    shifts = tl.arange(0, 8)[None, :] * BITS
    code = ((word[:, None] >> shifts.to(word.dtype)) & (2**BITS - 1)).to(tl.int32)
    if KIND < 0:
        dx = dy * _level(code, table, BITS)
    elif OFF_IS_0:
        dx = tl.where(code != 0, dy * on, 0.0)
    else:
        dx = dy * tl.where(code != 0, on, off)
    tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=there)


_encode_launch = Launcher(fewbit_encode)
_decode_launch = Launcher(fewbit_decode)
