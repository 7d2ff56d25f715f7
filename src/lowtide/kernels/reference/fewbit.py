"""Few-bit backward in plain torch: a number per input that says which slope it gets, a few bits each, and back.

Codes of b bits of 8 neighbours in memory make one word of b bytes: code e takes bits from e·b on. Bytes with the same
place in their words lie together, ⌊n/8⌋ of each for n codes. The last n mod 8 codes come after them as a word of their
own, cut to its bytes. That is ⌈b·n/8⌉ bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lowtide.compat.dispatch import without_modes
from lowtide.kernels.activations import Activation

_LEAST, _MOST_PIECES = 2**16, 8  # elements coded at a time, so that temporaries stay small


@dataclass(frozen=True, eq=False)
class Codebook:
    """Groups inputs of an activation that share a slope: code i from ``boundaries[i-1]`` on. NaN has the last code.

    A gate has no boundaries: its code is 1 where it is open.
    """

    activation: Activation
    boundaries: tuple[float, ...] = ()
    levels: tuple[float, ...] = ()

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return max(1, len(self.boundaries).bit_length())

    @cached_property
    def key(self) -> str:
        """A name that no other codebook has."""
        own = "" if self.activation.function is None else f"@{id(self.activation.function)}"
        content = hashlib.sha256(repr((self.boundaries, self.levels)).encode()).hexdigest()[:16]
        return f"{self.activation.name}{self.activation.numbers}{own}/{self.bits}/{content}"

    def __reduce__(self) -> Any:
        return codebook, (self.activation, self.boundaries, self.levels)

    def __repr__(self) -> str:
        return f"Codebook({self.activation}, {self.bits} bits)"


BOOKS: dict[str, Codebook] = {}  # by key: ops that are compiled or captured hold no objects


def codebook(activation: Activation, boundaries: Sequence[float] = (), levels: Sequence[float] = ()) -> Codebook:
    """The one codebook with this content."""
    book = Codebook(activation, tuple(boundaries), tuple(levels))
    return BOOKS.setdefault(book.key, book)


def packed_bytes(count: int, bits: int) -> int:
    """Return the bytes of so many codes.

    >>> packed_bytes(1000, 3), packed_bytes(3, 3)
    (375, 2)
    """
    return -(-count * bits // 8)


def encode(x: Tensor, book: Codebook) -> Tensor:
    """The codes of a dense tensor, in the order in which it lies in memory."""
    flat, bits = in_memory(x), book.bits
    codes = x.new_empty(packed_bytes(flat.numel(), bits), dtype=torch.uint8)
    groups = flat.numel() // 8
    planes = codes[: bits * groups].view(bits, groups)
    for part in _pieces(groups):
        words = _packed(_which(flat[8 * part.start : 8 * part.stop], book), bits)
        planes[:, part] = words[:, :bits].t()
    if left := flat.numel() - 8 * groups:
        eight = codes.new_zeros(8)
        eight[:left] = _which(flat[8 * groups :], book)
        codes[bits * groups :] = _packed(eight, bits)[0, : packed_bytes(left, bits)]
    return codes


def decode(dy: Tensor, codes: Tensor, book: Codebook) -> Tensor:
    """Dx = dy·slope for a dense dy that lies in memory as the coded x did."""
    dx = torch.empty_like(dy)
    flat, out, bits = in_memory(dy), in_memory(dx), book.bits
    groups = flat.numel() // 8
    planes = codes[: bits * groups].view(bits, groups)
    for part in _pieces(groups):
        words = codes.new_zeros(part.stop - part.start, 8)
        words[:, :bits] = planes[:, part].t()
        mine = slice(8 * part.start, 8 * part.stop)
        out[mine] = _scaled(flat[mine], _unpacked(words, bits), book)
    if left := flat.numel() - 8 * groups:
        word = codes.new_zeros(1, 8)
        word[0, : packed_bytes(left, bits)] = codes[bits * groups :]
        out[8 * groups :] = _scaled(flat[8 * groups :], _unpacked(word, bits)[:left], book)
    return dx


def _pieces(groups: int) -> Iterator[slice]:
    size = max(_LEAST // 8, -(-groups // _MOST_PIECES))
    for start in range(0, groups, size):
        yield slice(start, min(start + size, groups))


def _packed(which: Tensor, bits: int) -> Tensor:
    """Codes, a byte each, as words of 8: neighbours join, then pairs, then fours. The first bytes of a word count."""
    word = which.view(torch.int64)
    for width, low in _LANES:
        size = bits * width // 8
        word = (word & low) | ((word >> width & low) << size) if bits < 8 else word
    return word.view(torch.uint8).view(-1, 8)


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """Words of 8 codes as codes, a byte each."""
    word = words.view(torch.int64).view(-1)
    for width, _ in reversed(_LANES):
        size = bits * width // 8
        low = sum((2**size - 1) << at for at in range(0, 64, 2 * width))
        word = (word & low) | ((word >> size & low) << width) if bits < 8 else word
    return word.view(torch.uint8)


# The width of the lanes that are joined in pairs, and the bits of the lower lane of each pair.
_LANES = ((8, 0x00FF00FF00FF00FF), (16, 0x0000FFFF0000FFFF), (32, 0x00000000FFFFFFFF))


def in_memory(x: Tensor) -> Tensor:
    """A dense tensor as one row, in the order of memory."""
    return x.as_strided((x.numel(),), (1,))


def _which(x: Tensor, book: Codebook) -> Tensor:
    """The code of each input, a byte each."""
    if book.activation.is_gate:
        # By torch's own derivative, so that the ends of a gate are torch's to the last bit.
        closed, _ = book.activation.backward(x.new_ones(1), x.new_full((1,), book.activation.gate.closed_at))
        return (book.activation.backward(torch.ones_like(x), x)[0] != closed).view(torch.uint8)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if book.bits > 4:
        boundaries = constants(book, x.device, wide.dtype)[0]
        return torch.bucketize(wide, boundaries, right=True, out_int32=True).to(torch.uint8)
    which = torch.full_like(x, len(book.boundaries), dtype=torch.uint8)
    for boundary in _rounded(book):
        which -= (wide < boundary).view(torch.uint8)
    return which


def _scaled(dy: Tensor, which: Tensor, book: Codebook) -> Tensor:
    if not book.activation.is_gate:
        wide = torch.promote_types(dy.dtype, torch.float32)
        levels = constants(book, dy.device, wide)[1].index_select(0, which.int())
        return levels.mul_(dy).to(dy.dtype)
    gate = book.activation.gate
    x = torch.full_like(dy, gate.closed_at).masked_fill_(which != 0, gate.open_at)
    return book.activation.backward(dy, x)[0]


@lru_cache(maxsize=1024)
def constants(book: Codebook, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Boundaries and levels as tensors, rounded to float32 in every dtype, so that all dtypes have the same codes."""
    with without_modes():  # they outlive a trace, and do not belong to it
        boundaries, levels = (
            torch.tensor(values, dtype=torch.float32, device=device) for values in (book.boundaries, book.levels)
        )
        return boundaries.to(dtype), levels.to(dtype)


@lru_cache(maxsize=1024)
def _rounded(book: Codebook) -> tuple[float, ...]:
    return tuple(float(np.float32(boundary)) for boundary in book.boundaries)
