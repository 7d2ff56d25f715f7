# pyright: basic, reportArgumentType=false
"""Random sketches S·X in Triton. S is made in registers, from a seed; it is never in memory.

A program has some columns of one block of rows. It reads the block once and writes the rows that stay: (1 + ratio)
passes over X for blocks of up to 128 rows. A sample of rows reads only those. Larger blocks are read once for every 128
rows that stay.

The numbers are Philox's (Salmon et al., 2011), each a function of the seed and of its place: see ``reference``, which
has the same ones.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowtide.kernels.launches import Launcher
from lowtide.kernels.reference.randomized import DCT_SIGNS, KINDS, NORMALS, PLACES, SIGNS, Cut, Sketch

MOST_ROWS = 128  # of a block whose rows or frequencies are drawn by comparing each with each

_SIGNS, _NORMALS, _PLACES, _DCT_SIGNS = (tl.constexpr(n) for n in (SIGNS, NORMALS, PLACES, DCT_SIGNS))
_RADEMACHER, _GAUSSIAN, _DCT = (tl.constexpr(KINDS.index(kind)) for kind in ("rademacher", "gaussian", "dct"))


def project(x: Tensor, seed: Tensor, sketch: Sketch, dtype: torch.dtype | None = None) -> Tensor:
    """S·x for a matrix of any strides, as ``reference.project`` has it; rows and dct in blocks of ``MOST_ROWS``."""
    rows, columns = x.shape
    cut = Cut(rows, sketch.sketch_rows(rows), sketch.blocks(rows))
    out = x.new_empty(cut.sketch_rows, columns, dtype=dtype)
    most = cut.most(cut.sketch_rows)
    tile = max(16, min(128, 1 << (most - 1).bit_length()))  # of kept rows: 16 at least for a product of matrices
    numbers = (rows, columns, cut.sketch_rows, cut.blocks, x.stride(0), x.stride(1))
    if sketch.kind == "rows":
        width = 256
        grid = cut.blocks * -(-most // tile) * -(-columns // width)
        _sample_launch(grid, (x, out, seed), (*numbers, -(-most // tile)), (tile, MOST_ROWS, width))
        return out
    width = 128 if x.dtype.itemsize == 2 else 64
    grid = cut.blocks * -(-most // tile) * -(-columns // width)
    precision = "tf32x3" if x.dtype is torch.float32 else "tf32"
    _project_launch(
        grid, (x, out, seed), (*numbers, -(-most // tile)),
        (KINDS.index(sketch.kind), tile, MOST_ROWS, width, precision), num_warps=8 if tile > 64 else 4,
    )  # fmt: skip
    return out


@triton.jit
def _project(
    x_ptr, out_ptr, seed_ptr, rows, columns, sketch_rows, blocks, row_stride, column_stride, parts,
    KIND: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr, BH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Out[k] = Σ_j S[k, j] x[j] over the rows j of a block: one read of x for each tile of kept rows."""
    block, part, column = _place(tl.program_id(0), parts, columns, BH)
    first, n, out_first, k_count = _bounds(block, rows, sketch_rows, blocks)
    seed = tl.load(seed_ptr)
    k = part * BK + tl.arange(0, BK)
    acc = tl.zeros((BK, BH), dtype=tl.float32)
    frequency = tl.zeros((BK,), dtype=tl.int32)
    if KIND == _DCT:
        frequency = _drawn(seed, block, n, k, BN)
    for start in range(0, n, BN):
        j = start + tl.arange(0, BN)
        place = x_ptr + (first + j)[:, None] * row_stride + column[None, :].to(tl.int64) * column_stride
        x = tl.load(place, mask=(j < n)[:, None] & (column < columns)[None, :], other=0.0)
        if KIND == _RADEMACHER:
            s = _signs(seed, start // 128, k[:, None], block, j, _SIGNS)
        elif KIND == _GAUSSIAN:
            s = _normals(seed, j[None, :], k[:, None], block)
        else:
            turn = ((2 * j + 1)[None, :] * frequency[:, None]) % (4 * n)
            s = tl.cos(turn.to(tl.float32) * (1.5707963267948966 / n))
            s = s * _signs(seed, 0, k[:, None] * 0, block, j, _DCT_SIGNS)
        acc = tl.dot(s.to(x.dtype), x, acc, input_precision=PRECISION)
    scale = 1.0 / tl.sqrt(k_count.to(tl.float32) + tl.zeros((BK,), dtype=tl.float32))
    if KIND == _DCT:
        scale = tl.where(frequency == 0, scale, scale * 1.4142135623730951)
    _store(out_ptr, acc * scale[:, None], out_first, k, k_count, column, columns)


@triton.jit
def _sample(
    x_ptr, out_ptr, seed_ptr, rows, columns, sketch_rows, blocks, row_stride, column_stride, parts,
    BK: tl.constexpr, BN: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """Out[k] = √(n/k) x[j_k], for k rows j_k of the n of a block that are drawn without replacement."""
    block, part, column = _place(tl.program_id(0), parts, columns, BH)
    first, n, out_first, k_count = _bounds(block, rows, sketch_rows, blocks)
    k = part * BK + tl.arange(0, BK)
    j = _drawn(tl.load(seed_ptr), block, n, k, BN)
    place = x_ptr + (first + j)[:, None] * row_stride + column[None, :].to(tl.int64) * column_stride
    x = tl.load(place, mask=(k < k_count)[:, None] & (column < columns)[None, :], other=0.0)
    scale = tl.sqrt(n.to(tl.float32) / k_count.to(tl.float32) + tl.zeros((BK,), dtype=tl.float32))
    _store(out_ptr, x.to(tl.float32) * scale[:, None], out_first, k, k_count, column, columns)


@triton.jit
def _place(program, parts, columns, BH: tl.constexpr):
    """Neighbours in memory are neighbours in time: columns first."""
    widths = tl.cdiv(columns, BH)
    column = (program % widths) * BH + tl.arange(0, BH)
    return program // widths // parts, (program // widths) % parts, column


@triton.jit
def _bounds(block, rows, sketch_rows, blocks):
    """The first row of a block and how many it has; the same of the rows that it keeps."""
    wide = block.to(tl.int64)
    first, last = wide * rows // blocks, (wide + 1) * rows // blocks
    out_first, out_last = wide * sketch_rows // blocks, (wide + 1) * sketch_rows // blocks
    return first, (last - first).to(tl.int32), out_first, (out_last - out_first).to(tl.int32)


@triton.jit
def _store(out_ptr, values, first, k, k_count, column, columns):
    place = out_ptr + (first + k)[:, None] * columns + column[None, :]
    mask = (k < k_count)[:, None] & (column < columns)[None, :]
    tl.store(place, values.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _signs(seed, tile, k, block, j, STREAM: tl.constexpr):
    """Signs for a column of k and a row of j: Philox once for each k, a bit for each j."""
    zero = k * 0
    w0, w1, w2, w3 = tl.philox(seed, zero + tile, k, zero + block, zero + STREAM)
    word = ((j % 128) // 32)[None, :]
    bits = tl.where(word < 2, tl.where(word == 0, w0, w1), tl.where(word == 2, w2, w3))
    bit = (bits >> (j % 32)[None, :].to(tl.uint32)) & 1
    return 1.0 - 2.0 * bit.to(tl.float32)


@triton.jit
def _normals(seed, j, k, block):
    """Box and Muller's."""
    zero = j * 0 + k * 0
    first, second, _, _ = tl.philox(seed, zero + j, zero + k, zero + block, zero + _NORMALS)
    uniform = (first.to(tl.float32) + 1.0) * 2.3283064365386963e-10
    radius = tl.sqrt(-2.0 * tl.log(tl.minimum(uniform, 1.0)))
    return radius * tl.cos(second.to(tl.float32) * 1.4629180792671596e-09)


@triton.jit
def _drawn(seed, block, n, k, BN: tl.constexpr):
    """For each k, the row that is k-th in a random order of n: k keys are smaller, or equal and of an earlier row."""
    i = tl.arange(0, BN)
    zero = i * 0
    word, _, _, _ = tl.philox(seed, i, zero, zero + block, zero + _PLACES)
    key = tl.where(i < n, word.to(tl.int64), 4294967296)
    smaller = (key[None, :] < key[:, None]) | ((key[None, :] == key[:, None]) & (i[None, :] < i[:, None]))
    rank = tl.sum(smaller.to(tl.int32), axis=1)
    return tl.sum(tl.where(rank[None, :] == k[:, None], i[None, :], 0), axis=1)


_project_launch = Launcher(_project, "project_rows")
_sample_launch = Launcher(_sample, "sample_rows")
