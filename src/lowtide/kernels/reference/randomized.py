"""Random sketches of a matrix's rows, S·X, by torch's own ops: what the kernels in Triton must give.

The rows of X are cut into blocks of nearly equal size, each sketched by itself: S is block-diagonal, with E[SᵀS] = I.
The entries of S are functions of a seed and of their place (Philox), so that backward has the same S from eight bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from lowtide.compat.fake import FakeTensor
from lowtide.errors import LowtideError

SketchKind = Literal["rademacher", "gaussian", "rows", "dct"]
KINDS: tuple[SketchKind, ...] = get_args(SketchKind)
BITS = 128  # that one call of Philox gives

# The last word of Philox's counter: what the numbers are for.
SIGNS, NORMALS, PLACES, DCT_SIGNS = range(4)

_AT_ONCE = 2**20  # the most numbers of S at a time; fewer than x has where that is small
_AT_LEAST = 2**12
_DIRECT = 512  # rows of a block up to which the DCT is a product with its matrix


@dataclass(frozen=True, slots=True)
class Sketch:
    """A way to sketch rows: K = ratio · N of N rows stay, in blocks of at most ``block`` rows (None: one block).

    A block keeps at least one row: where the ratio is less than 1 / block, blocks are larger.

    >>> Sketch("rademacher", 0.2).sketch_rows(1000), Sketch("rademacher", 0.2).blocks(1000)
    (200, 8)
    """

    kind: SketchKind = "rademacher"
    ratio: float = 0.2
    block: int | None = 128

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise LowtideError(f"Unknown sketch {self.kind!r}", hint=f"Known: {', '.join(KINDS)}.")
        if not 0 < self.ratio <= 1:
            raise LowtideError(f"ratio={self.ratio!r} is not a share of the rows", hint="Use one above 0, up to 1.")
        if self.block is not None and (not isinstance(self.block, int) or self.block < 2):
            raise LowtideError(
                f"block={self.block!r} is not a number of rows", hint="Use 2 rows or more, or None for one block."
            )

    def sketch_rows(self, rows: int) -> int:
        """K: how many rows the sketch of so many rows has."""
        return max(1, round(self.ratio * rows)) if rows else 0

    def blocks(self, rows: int) -> int:
        """Number of blocks into which so many rows are cut."""
        wanted = 1 if self.block is None else -(-rows // self.block)
        return max(1, min(wanted, self.sketch_rows(rows)))


def project(x: Tensor, seed: Tensor, sketch: Sketch, dtype: torch.dtype | None = None) -> Tensor:
    """S·x for x with N rows: K rows, in x's dtype or another. ``seed`` is an int64 scalar on x's device."""
    dtype = dtype or x.dtype
    cut = Cut(x.shape[0], sketch.sketch_rows(x.shape[0]), sketch.blocks(x.shape[0]))
    wide = torch.promote_types(x.dtype, torch.float32)
    if sketch.kind == "rows":
        places, scale = _chosen(seed, cut)
        return x[places].to(wide).mul_(scale.to(wide)).to(dtype)
    if sketch.kind == "dct" and cut.most(cut.rows) > _DIRECT:
        return _transform(x, seed, cut, dtype)
    chunks = list(_chunks(cut, x.shape[1]))
    if cut.blocks == len(chunks) == 1:
        entries = _entries(sketch.kind, seed, cut, (0, 1), (0, cut.sketch_rows))[0].to(wide)
        return torch.mm(entries, x.to(wide)).mul_(cut.sketch_rows**-0.5).to(dtype)
    out = x.new_empty(cut.sketch_rows, x.shape[1], dtype=dtype)
    for low, high, first, last in chunks:
        start, stop = cut.start(low, cut.sketch_rows) + first, cut.start(high, cut.sketch_rows)
        stop = min(start + last - first, stop) if high - low == 1 else stop
        place = torch.arange(start, stop, device=x.device)
        block = cut.block_of(place, cut.sketch_rows)
        entries = _entries(sketch.kind, seed, cut, (low, high), (first, last)).to(wide)
        part = torch.bmm(entries, _padded(x, cut, low, high).to(wide)).flatten(0, 1)
        inner = (block - low) * (last - first) + place - cut.start(block, cut.sketch_rows) - first
        out[start:stop] = part[inner].mul_(cut.size(block, cut.sketch_rows).to(wide).rsqrt_().unsqueeze(1))
    return out


class Cut(NamedTuple):
    """Rows cut into blocks whose sizes differ by one at most, and their sketch cut into as many."""

    rows: int
    sketch_rows: int
    blocks: int

    def start(self, block: Any, total: int) -> Any:
        """Return the first row of a block, among all rows or all kept rows; blocks as a number or a tensor."""
        return block * total // self.blocks

    def size(self, block: Any, total: int) -> Any:
        return self.start(block + 1, total) - self.start(block, total)

    def most(self, total: int) -> int:
        """The size of the largest block."""
        return -(-total // self.blocks)

    def block_of(self, place: Tensor, total: int) -> Tensor:
        """The block that a row is in."""
        return ((place + 1) * self.blocks - 1) // total


def philox(seed: Tensor, c0: Any, c1: Any, c2: Any, c3: int, rounds: int = 10) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four words of 32 random bits for each counter (Salmon et al., 2011: Philox4x32), held as int64."""
    # A number that is filled in on the device, and not copied to it, may be captured in a CUDA graph.
    words = (c if isinstance(c, Tensor) else seed.new_full((), c) for c in (c0, c1, c2, c3))
    counter = torch.broadcast_tensors(*words)
    if isinstance(seed, FakeTensor) and seed.device.type == "cpu":
        w0, w1, w2, w3 = (seed.new_empty(counter[0].shape) for _ in range(4))  # as much as numpy's way shows
        return w0, w1, w2, w3
    if seed.device.type != "cpu":
        w0, w1, w2, w3 = _rounds(seed, *counter, rounds=rounds)
        return w0, w1, w2, w3
    # The same by numpy, whose small ops take a fraction of torch's time; on one number it would warn of wrapping.
    shape = counter[0].shape
    words = _rounds(seed.reshape(1).numpy(), *(c.reshape(-1).numpy() for c in counter), rounds=rounds)
    w0, w1, w2, w3 = (torch.from_numpy(word).view(shape) for word in words)
    return w0, w1, w2, w3


def _rounds(seed: Any, c0: Any, c1: Any, c2: Any, c3: Any, *, rounds: int) -> tuple[Any, Any, Any, Any]:
    k0, k1 = seed & _WORD, (seed >> 32) & _WORD
    for _ in range(rounds):
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # they wrap, which leaves all 64 bits right
        c0, c1, c2, c3 = ((b >> 32) & _WORD) ^ c1 ^ k0, b & _WORD, ((a >> 32) & _WORD) ^ c3 ^ k1, a & _WORD
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return c0, c1, c2, c3


_WORD = 0xFFFFFFFF


# -- the entries of S, without the factor 1/√k of a block that keeps k rows ---------------------------------


def _chunks(cut: Cut, columns: int) -> Iterator[tuple[int, int, int, int]]:
    """Blocks from low to high, and of each the kept rows from first to last: one block, or all kept rows."""
    rows, sketch_rows = cut.most(cut.rows), cut.most(cut.sketch_rows)
    numbers = min(_AT_ONCE, max(_AT_LEAST, cut.rows * columns // 8))
    if rows * sketch_rows > numbers:
        step = max(1, numbers // rows)
        for block in range(cut.blocks):
            for first in range(0, cut.size(block, cut.sketch_rows), step):
                yield block, block + 1, first, min(first + step, sketch_rows)
        return
    step = max(1, min(numbers // (rows * sketch_rows), 4 * _AT_ONCE // (rows * columns)))
    for low in range(0, cut.blocks, step):
        yield low, min(low + step, cut.blocks), 0, sketch_rows


def _padded(x: Tensor, cut: Cut, low: int, high: int) -> Tensor:
    """Blocks of x, one after the other, those that are a row short filled up with zeros."""
    start, stop = cut.start(low, cut.rows), cut.start(high, cut.rows)
    most = cut.most(cut.rows)
    if stop - start == (high - low) * most:
        return x[start:stop].reshape(high - low, most, x.shape[1])
    block = torch.arange(low, high, device=x.device)
    place = cut.start(block, cut.rows).unsqueeze(1) + torch.arange(most, device=x.device)
    short = place >= cut.start(block + 1, cut.rows).unsqueeze(1)
    return x[place.clamp_(max=cut.rows - 1)].masked_fill_(short.unsqueeze(2), 0)


def _entries(kind: str, seed: Tensor, cut: Cut, blocks: tuple[int, int], sketch_rows: tuple[int, int]) -> Tensor:
    """S of some blocks, for some of the rows that each keeps: blocks x kept x rows."""
    block = torch.arange(*blocks, device=seed.device).view(-1, 1, 1)
    k = torch.arange(*sketch_rows, device=seed.device).view(1, -1, 1)
    j = torch.arange(cut.most(cut.rows), device=seed.device)
    if kind == "rademacher":
        return _signs(seed, k, block, len(j), SIGNS)
    if kind == "gaussian":
        first, second, _, _ = philox(seed, j, k, block, NORMALS)
        return _normal(first, second)
    rows = cut.size(block, cut.rows)
    frequency = _order(seed, cut, blocks)[:, sketch_rows[0] : sketch_rows[1]].unsqueeze(2)
    turn = (2 * j + 1) * frequency % (4 * rows)  # exact: the cosine's period is 4n of these
    cosine = torch.cos(turn.double() * (math.pi / 2 / rows.double()))
    factor = torch.where(frequency == 0, 1.0, math.sqrt(2)).double()
    return cosine.mul_(factor).mul_(_signs(seed, 0 * block, block, len(j), DCT_SIGNS))


def _signs(seed: Tensor, k: Tensor, block: Tensor, rows: int, stream: int) -> Tensor:
    """+1 or -1 for each row j: bit j % 128 of Philox at (j / 128, k, block)."""
    tile = torch.arange(-(-rows // BITS), device=seed.device)
    words = torch.stack(philox(seed, tile, k, block, stream), dim=-1).to(torch.int32)
    places = torch.arange(32, dtype=torch.int32, device=seed.device)
    bits = (words.unsqueeze(-1) >> places).bitwise_and_(1).mul_(-2).add_(1)
    return bits.flatten(-3)[..., :rows].to(torch.float32)


def _normal(first: Tensor, second: Tensor) -> Tensor:
    """Box and Muller's, from 32 bits each, in float32 as a GPU does it."""
    radius = (-2 * ((first + 1).to(torch.float32) * 2.0**-32).log()).sqrt_()
    return radius.mul_((second.to(torch.float32) * (2.0**-31 * math.pi)).cos_())


# -- rows, or frequencies, drawn without replacement ------------------------------------------------------


def _order(seed: Tensor, cut: Cut, blocks: tuple[int, int]) -> Tensor:
    """The kept rows of each block, in a random order."""
    block = torch.arange(*blocks, device=seed.device).unsqueeze(1)
    j = torch.arange(cut.most(cut.rows), device=seed.device)
    key = philox(seed, j, 0, block, PLACES)[0]
    key = torch.where(j < cut.size(block, cut.rows), key, _WORD + 1)
    return key.argsort(dim=1, stable=True)[:, : cut.most(cut.sketch_rows)]


def _chosen(seed: Tensor, cut: Cut) -> tuple[Tensor, Tensor]:
    """For each row of the sketch, its row of x and the factor."""
    place = torch.arange(cut.sketch_rows, device=seed.device)
    block = cut.block_of(place, cut.sketch_rows)
    order = _order(seed, cut, (0, cut.blocks))
    chosen = cut.start(block, cut.rows) + order[block, place - cut.start(block, cut.sketch_rows)]
    scale = (cut.size(block, cut.rows).double() / cut.size(block, cut.sketch_rows)).sqrt().unsqueeze(1)
    return chosen, scale


def _transform(x: Tensor, seed: Tensor, cut: Cut, dtype: torch.dtype) -> Tensor:
    """Rows of the DCT of signed blocks, by FFT (Makhoul, 1980), some columns at a time."""
    wide = torch.promote_types(x.dtype, torch.float32)
    out = x.new_empty(cut.sketch_rows, x.shape[1], dtype=dtype)
    for block in range(cut.blocks):
        start, rows = cut.start(block, cut.rows), cut.size(block, cut.rows)
        here = slice(cut.start(block, cut.sketch_rows), cut.start(block + 1, cut.sketch_rows))
        frequency = _order(seed, cut, (block, block + 1))[0, : here.stop - here.start]
        index = torch.full((1, 1, 1), block, device=x.device)
        sign = _signs(seed, 0 * index, index, rows, DCT_SIGNS).view(-1, 1).to(wide)
        # The even rows, then the odd ones backwards: of these the FFT has the DCT in it.
        place = torch.arange(rows, device=x.device)
        place = torch.cat([place[::2], place[1::2].flip(0)])
        mirrored = torch.minimum(frequency, rows - frequency)
        turn = frequency.to(wide).mul_(math.pi / 2 / rows).unsqueeze(1)
        factor = torch.where(frequency == 0, 1.0, math.sqrt(2)).to(wide).unsqueeze(1) / math.sqrt(len(frequency))
        conjugate = torch.where(frequency == mirrored, 1.0, -1.0).to(wide).unsqueeze(1)
        step = max(1, 4 * _AT_ONCE // rows)
        for column in range(0, x.shape[1], step):
            values = x[start : start + rows, column : column + step].to(wide) * sign
            spectrum = torch.fft.rfft(values[place], dim=0)[mirrored]
            real = spectrum.real * turn.cos() + spectrum.imag * conjugate * turn.sin()
            out[here, column : column + step] = real * factor
    return out
