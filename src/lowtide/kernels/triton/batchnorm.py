"""Batch norm + activation in Triton, forward and backward, for NCHW and NHWC.

A *tile* is one channel (NCHW) or a few neighbours (NHWC). If a tile fits the registers of one program, one launch takes
the fewest passes over memory. They are 2 forward (read x, write z) and 3 backward (read dz and the saved tensor, write
dx). Otherwise a first launch sums. All its programs go through the tensor side by side, from its beginning to its end.
The last one of each tile adds the sums up. A second launch writes the result. That is 3 passes and 5, less the reads
that the second launch finds in the cache. It starts at the end, which the sums read last.

Results do not depend on timing: sums are put down by position and added in order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowtide.compat.cuda import current_stream
from lowtide.compat.fake import FakeTensor
from lowtide.kernels.activations import Activation
from lowtide.kernels.launches import Launcher
from lowtide.kernels.reference.batchnorm import Affine, Keeps, Running, Sums
from lowtide.kernels.triton import batchnorm_programs as programs
from lowtide.kernels.triton.activations import CODES, GELU_TANH

_KEEPS = {"x": 0, "xhat": 1, "z": 2}
_STAGES = 3  # loads that a program that sums has in flight


class _Tile(NamedTuple):
    """The values that a program works on at a time, chosen by measuring on an H200."""

    block_bytes: int
    width_bytes: int  # of the block, in NHWC: channels that are neighbours
    warps: int
    streams: int = 0  # programs for each processor, each of which takes many blocks


_SUMS = {"NCHW": _Tile(2**13, 0, 4, 4), "NHWC": _Tile(2**14, 128, 8, 2)}
_MAP = _Tile(2**12, 256, 4)
_WHOLE = _Tile(2**15, 64, 8)  # the largest tile that one program holds, in float32
_REGISTERS = 128  # of a thread that sums, so that all streams run at once


class TileBlocks(NamedTuple):
    """A tensor cut into tiles of a few channels, and tiles into blocks of rows."""

    tiles: int
    blocks: int  # of a tile
    constants: tuple[int | bool, ...]  # L, NHWC, WIDE, BM and BC of the programs
    warps: int


@dataclass(frozen=True, eq=False)  # one object for each layout, compared by identity: it is looked up in every call
class LaunchGrid:
    """The order of a tensor in memory, and the share of each program."""

    channels: int
    rows: int  # values per channel
    device: int | None  # of CUDA
    whole: TileBlocks | None  # where a tile is one block that one program holds
    sums: TileBlocks
    parts: int  # of a tile: programs that sum
    at_once: int  # parts whose sums are loaded together
    map: TileBlocks


@lru_cache(maxsize=4096)
def grid_of(
    shape: torch.Size, nhwc: bool, dtype: torch.dtype, device: torch.device, streams: int | None = None
) -> LaunchGrid:
    """``streams``, for tests: as many parts over all tiles, also where a tile would fit one program."""
    channels = shape[1]
    rows = shape.numel() // channels
    nhwc = nhwc or len(shape) == 2
    common = (1 if nhwc else rows // shape[0], nhwc, shape.numel() >= 2**31)  # the last: offsets need 64 bits

    def cut(values: int, width_bytes: int, warps: int) -> TileBlocks:
        block_channels = min(_power(channels), width_bytes // dtype.itemsize) if nhwc else 1
        block_rows = min(_power(rows), values // block_channels)
        tiles = -(-channels // block_channels)
        return TileBlocks(tiles, -(-rows // block_rows), (*common, block_rows, block_channels), warps)

    shape_of_sums = _SUMS["NHWC" if nhwc else "NCHW"]
    whole = cut(_WHOLE.block_bytes // 4, _WHOLE.width_bytes, _WHOLE.warps)
    sums = cut(shape_of_sums.block_bytes // dtype.itemsize, shape_of_sums.width_bytes, shape_of_sums.warps)
    programs = streams or shape_of_sums.streams * _processors(device)
    parts = min(max(1, programs // sums.tiles), sums.blocks)
    at_once = min(_power(parts), max(1, 4096 // sums.constants[-1]))
    whole_fits = streams is None and whole.blocks == 1
    by_value = cut(_MAP.block_bytes // dtype.itemsize, _MAP.width_bytes, _MAP.warps)
    return LaunchGrid(channels, rows, device.index, whole if whole_fits else None, sums, parts, at_once, by_value)


def _power(number: int) -> int:
    """The next power of 2."""
    return 1 << (number - 1).bit_length()


def _grid(x: Tensor) -> LaunchGrid:
    return grid_of(x.shape, is_nhwc(x), x.dtype, x.device)


_forward_whole_launch = Launcher(programs.forward_whole)
_measure_launch = Launcher(programs.measure)
_normalize_launch = Launcher(programs.normalize)
_backward_whole_launch = Launcher(programs.backward_whole)
_reduce_launch = Launcher(programs.reduce)
_apply_launch = Launcher(programs.apply)


class _Scratch(NamedTuple):
    """Memory for the sums of parts of tiles, and for counts of finished parts; launches leave the counts at 0."""

    sums: Tensor
    counts: Tensor


_scratches: dict[tuple[int | None, int], list[_Scratch]] = {}


def _scratch(grid: LaunchGrid, x: Tensor) -> _Scratch:
    """One for each stream, on which launches do not overlap; one that became too small may be in a captured graph."""
    if isinstance(x, FakeTensor):
        return _Scratch(x.new_empty(0), x.new_empty(0))  # it stays from step to step, and is small
    device = x.device
    stream = current_stream(grid.device) if grid.device is not None else 0
    held = _scratches.setdefault((grid.device, stream), [])
    needed = 3 * grid.parts * grid.channels
    if held and held[-1].sums.numel() >= needed and held[-1].counts.numel() >= grid.sums.tiles:
        return held[-1]
    sums = torch.empty(max(2**18, _power(needed)), dtype=torch.float32, device=device)
    counts = torch.zeros(max(2**12, _power(grid.sums.tiles)), dtype=torch.int32, device=device)
    scratch = _Scratch(sums, counts)
    if grid.device is None or not torch.cuda.is_current_stream_capturing():  # there the zeros are still to come
        held.append(scratch)
    return scratch


@cache
def _processors(device: torch.device) -> int:
    """Return the number of processors; 1 for an absent GPU, where nothing is launched."""
    here = device.type == "cuda" and torch.cuda.is_available()
    return torch.cuda.get_device_properties(device).multi_processor_count if here else 1


def is_nhwc(x: Tensor) -> bool:
    """Tell whether channels are neighbours in memory, without gaps."""
    if x.dim() not in (4, 5) or x.is_contiguous():
        return False
    return x.is_contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)


def _dense(x: Tensor) -> Tensor:
    """The tensor itself, or a copy that lies as the kernels want it."""
    return x if is_nhwc(x) else x.contiguous()


def _like(tensor: Tensor | None, x: Tensor) -> Any:
    """A tensor with the shape, the dtype and the layout of x; None stays None."""
    if tensor is None or (tensor.shape == x.shape and tensor.stride() == x.stride() and tensor.dtype == x.dtype):
        return tensor
    return torch.empty_like(x).copy_(tensor)


def _numbers(activation: Activation) -> tuple[int, float, float]:
    code = GELU_TANH if activation.name == "gelu" and activation.numbers[0] else CODES[activation.name]
    a, b = (*activation.numbers, 0.0, 0.0)[:2]
    return code, float(a), float(b)


def forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running: Running,
    activation: Activation,
    slopes: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    eps: float,
    keep_xhat: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The output z, mean, 1/σ, and x̂ if wanted; the running statistics follow."""
    x = _dense(x)
    residual = _like(residual, x)
    grid = _grid(x)
    if grid.whole is None:
        mean, invstd = measure(x, running, eps=eps)
        affine = Affine(mean, invstd, weight, bias)
        z, xhat = normalize(x, "x", affine, activation, slopes, residual, keep_xhat=keep_xhat)
        return z, mean, invstd, xhat
    mean, invstd = _per_channel(grid, x), _per_channel(grid, x)
    z = torch.empty_like(x)
    xhat = torch.empty_like(x) if keep_xhat else None
    code, a, b = _numbers(activation)
    held, var, momentum, batches = running
    _forward_whole_launch(
        grid.whole.tiles,
        (x, z, xhat, residual, mean, invstd, weight, bias, slopes, held, var, batches),
        (grid.channels, grid.rows, float(eps), float(momentum), a, b),
        (*grid.whole.constants, code, keep_xhat, residual is not None, weight is not None, bias is not None,
         held is not None, batches is not None, slopes is not None and slopes.numel() == 1),
        num_warps=grid.whole.warps,
    )  # fmt: skip
    _wrote(held, var, batches)
    return z, mean, invstd, xhat


def measure(x: Tensor, running: Running, *, eps: float) -> tuple[Tensor, Tensor]:
    """The mean and 1/σ of each channel; the running statistics follow."""
    x = _dense(x)
    grid = _grid(x)
    mean, invstd = _per_channel(grid, x), _per_channel(grid, x)
    scratch = _scratch(grid, x)
    held, var, momentum, batches = running
    _measure_launch(
        grid.sums.tiles * grid.parts,
        (x, mean, invstd, held, var, batches, scratch.sums, scratch.counts),
        (grid.channels, grid.rows, grid.parts, float(eps), float(momentum)),
        (*grid.sums.constants, grid.at_once, _STAGES, held is not None, batches is not None),
        num_warps=grid.sums.warps, maxnreg=_REGISTERS,
    )  # fmt: skip
    _wrote(held, var, batches)
    return mean, invstd


def normalize(
    saved: Tensor,
    keeps: Keeps,
    affine: Affine,
    activation: Activation,
    slopes: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    keep_xhat: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The output z from x or x̂ with the statistics given, and x̂ if wanted."""
    saved = _dense(saved)
    residual = _like(residual, saved)
    grid = _grid(saved)
    z = torch.empty_like(saved)
    xhat = torch.empty_like(saved) if keep_xhat else None
    code, a, b = _numbers(activation)
    mean, invstd, weight, bias = affine
    _normalize_launch(
        grid.map.tiles * grid.map.blocks,
        (saved, z, xhat, residual, mean, invstd, weight, bias, slopes),
        (grid.channels, grid.rows, grid.map.tiles, a, b),
        (*grid.map.constants, code, keep_xhat, keeps == "xhat", residual is not None, weight is not None,
         bias is not None, slopes is not None and slopes.numel() == 1), num_warps=grid.map.warps,
    )  # fmt: skip
    return z, xhat


def backward(
    dz: Tensor,
    saved: Tensor,
    keeps: Keeps,
    affine: Affine,
    activation: Activation,
    slopes: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    training: bool,
    joined: Tensor | None = None,
    sums: Sums | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """dx, dγ, dβ, the gradient of a PReLU's slopes, and dy, which is written only for a residual.

    ``joined`` is the z of a join whose residual was not saved: its sign is that of y. ``sums`` turns this process's
    Σ dy and Σ dy·x̂ into the means over all.
    """
    saved = _dense(saved)
    dz = _like(dz, saved)
    added = _like(residual if joined is None else joined, saved)
    grid = _grid(saved)
    code, a, b = _numbers(activation)
    mean, invstd, weight, bias = affine
    dbias, dweight = _per_channel(grid, saved), _per_channel(grid, saved)
    dslopes = None if slopes is None else _per_channel(grid, saved)
    dx = torch.empty_like(saved)
    dy = torch.empty_like(saved) if added is not None else dz
    joins = 2 if joined is not None else int(residual is not None)
    has = (joins, weight is not None, bias is not None, slopes is not None and slopes.numel() == 1)
    parameters = (mean, invstd, weight, bias, slopes)
    gradients = (dbias, dweight, dslopes)
    unit = _unit(saved.dtype)
    if grid.whole is not None and sums is None:
        _backward_whole_launch(
            grid.whole.tiles, (dz, saved, added, dx, dy, *parameters, *gradients),
            (grid.channels, grid.rows, a, b, unit),
            (*grid.whole.constants, code, _KEEPS[keeps], training, *has), num_warps=grid.whole.warps,
        )  # fmt: skip
    else:
        scratch = _scratch(grid, saved)
        _reduce_launch(
            grid.sums.tiles * grid.parts,
            (dz, saved, added, *parameters, *gradients, scratch.sums, scratch.counts),
            (grid.channels, grid.rows, grid.parts, a, b, unit),
            (*grid.sums.constants, grid.at_once, _STAGES, code, _KEEPS[keeps], *has),
            num_warps=grid.sums.warps, maxnreg=_REGISTERS,
        )  # fmt: skip
        means, count = ((dbias, dweight), float(grid.rows)) if sums is None else (sums(dbias, dweight), 1.0)
        _apply_launch(
            grid.map.tiles * grid.map.blocks, (dz, saved, added, dx, dy, *parameters, *means),
            (grid.channels, grid.rows, grid.map.tiles, count, a, b, unit),
            (*grid.map.constants, code, _KEEPS[keeps], training, *has), num_warps=grid.map.warps,
        )  # fmt: skip
    if dslopes is not None and slopes is not None and slopes.numel() == 1:
        dslopes = dslopes.sum().view(slopes.shape)
    return dx, dweight, dbias, dslopes, dy


def _per_channel(grid: LaunchGrid, x: Tensor) -> Tensor:
    return torch.empty(grid.channels, dtype=torch.float32, device=x.device)


@cache
def _unit(dtype: torch.dtype) -> float:
    """The unit roundoff."""
    return torch.finfo(dtype).eps / 2


def _wrote(*buffers: Tensor | None) -> None:
    """Raise the version counters of buffers that a kernel wrote in place."""
    torch.autograd.graph.increment_version([buffer for buffer in buffers if buffer is not None])
