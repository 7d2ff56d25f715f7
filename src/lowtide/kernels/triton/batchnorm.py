"""Batch norm + activation in Triton, forward and backward, for NCHW and NHWC.

A *tile* is one channel (NCHW) or a few neighbours (NHWC). Where a tile fits the registers of one program, one launch
does it in the fewest passes over memory there can be: 2 forward (read x, write z) and 3 backward (read dz and what was
kept, write dx). Otherwise tiles are cut into parts: a launch sums them, its last program of each tile adds the sums up,
and a second launch makes the result. That is 3 passes and 5, less what the second launch finds in the cache: it goes
through every part backwards, so that it meets first what the sums saw last.

Results do not depend on timing: sums are put down by position and added in order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from lowtide.kernels.activations import Activation
from lowtide.kernels.reference.batchnorm import Affine, Keeps, Running, Sums
from lowtide.kernels.triton import batchnorm_programs as programs
from lowtide.kernels.triton.activations import CODES, GELU_TANH

_KEEPS = {"x": 0, "xhat": 1, "z": 2}
_WHOLE_VALUES = 8192  # the largest tile that one program holds
_BLOCK_BYTES = 2**14  # that a program loads at a time otherwise
_STREAMS = 2  # programs for each processor that sum
_STAGES = 3  # loads that such a program has in flight
_REGISTERS = 128  # of a thread, so that two of them run on a processor


@dataclass(frozen=True, eq=False)  # one object for each layout, compared by identity: it is looked up in every call
class Grid:
    """How a tensor lies in memory, and how its values are shared out over programs."""

    channels: int
    rows: int  # values per channel
    length: int  # neighbours in memory of one channel; 1 in NHWC
    nhwc: bool
    wide: bool  # offsets need 64 bits
    block_channels: int
    block_rows: int
    tiles: int
    parts: int  # of a tile
    part: int  # rows
    blocks: int  # of a part
    whole: bool  # a tile is one block
    at_once: int  # parts whose sums are loaded together
    common: tuple[int | bool, ...]  # the constants L, NHWC and WIDE of every program

    @property
    def warps(self) -> int:
        return 8 if self.block_rows * self.block_channels > 4096 else 4


@lru_cache(maxsize=4096)
def grid_of(shape: torch.Size, nhwc: bool, item_bytes: int, device: torch.device, streams: int | None = None) -> Grid:
    """``streams``, for tests: as many parts over all tiles, also where a tile would fit one program."""
    channels = shape[1]
    rows = shape.numel() // channels
    nhwc = nhwc or len(shape) == 2
    block_channels = min(_power(channels), 64 // item_bytes) if nhwc else 1
    whole = streams is None and _power(rows) * block_channels <= _WHOLE_VALUES
    if not whole and nhwc:
        block_channels = min(_power(channels), 256 // item_bytes)
    block_rows = min(_power(rows), (_WHOLE_VALUES if whole else _BLOCK_BYTES // item_bytes) // block_channels)
    tiles = -(-channels // block_channels)
    parts = 1 if whole else -(-(streams or _STREAMS * _processors(device)) // tiles)
    part = -(-rows // (parts * block_rows)) * block_rows
    parts = -(-rows // part)
    length, wide = 1 if nhwc else rows // shape[0], shape.numel() >= 2**31
    return Grid(
        channels, rows, length, nhwc, wide, block_channels, block_rows, tiles, parts, part, part // block_rows, whole,
        min(_power(parts), max(1, 4096 // block_channels)), (length, nhwc, wide),
    )  # fmt: skip


def _power(number: int) -> int:
    """The next power of 2."""
    return 1 << (number - 1).bit_length()


def _grid(x: Tensor, streams: int | None = None) -> Grid:
    return grid_of(x.shape, is_nhwc(x), x.element_size(), x.device, streams)


class _Launcher:
    """Launches a kernel with as little Python as can be: once compiled for a key, it is called directly.

    A key must hold all that Triton specialises on: constants, which pointers are None, and the integers' values.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._compiled: dict[Any, Any] = {}

    def __call__(self, count: int, key: Any, *args: Any, constants: tuple[Any, ...], **options: int) -> None:
        compiled = self._compiled.get((key, constants))
        if compiled is not None:
            compiled[(count, 1, 1)](*args, *constants)
        else:  # the interpreter compiles nothing and gives None: there this way is always taken
            self._compiled[key, constants] = self._kernel[(count,)](*args, *constants, **options)


def _key(grid: Grid, x: Tensor, *others: Tensor | None) -> tuple[Any, ...]:
    """The layout and the dtypes, and whether all that the caller gave is aligned; what we allocate is."""
    bits, dtypes = x.data_ptr(), [x.dtype]
    for tensor in others:
        if tensor is None:
            dtypes.append(None)  # pyright: ignore[reportArgumentType]
        else:
            bits |= tensor.data_ptr()
            dtypes.append(tensor.dtype)
    return (grid, bits & 15 == 0, *dtypes)


_forward_whole_launch = _Launcher(programs.forward_whole)
_measure_launch = _Launcher(programs.measure)
_normalize_launch = _Launcher(programs.normalize)
_backward_whole_launch = _Launcher(programs.backward_whole)
_reduce_launch = _Launcher(programs.reduce)
_apply_launch = _Launcher(programs.apply)

_counters: dict[tuple[torch.device, int], Tensor] = {}


def _counters_for(device: torch.device, tiles: int) -> Tensor:
    """One counter for each tile; every launch leaves them at 0. One set per stream, on which launches never overlap."""
    stream = torch._C._cuda_getCurrentRawStream(device.index or 0) if device.type == "cuda" else 0
    found = _counters.get((device, stream))
    if found is None or found.numel() < tiles:
        size = max(4096, _power(tiles))
        found = _counters[device, stream] = torch.zeros(size, dtype=torch.int32, device=device)
    return found


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def is_nhwc(x: Tensor) -> bool:
    """Whether channels are neighbours in memory, without gaps."""
    if x.dim() not in (4, 5) or x.is_contiguous():
        return False
    return x.is_contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)


def dense(x: Tensor) -> Tensor:
    """The tensor itself, or a copy that lies as the kernels want it."""
    return x if is_nhwc(x) else x.contiguous()


def like(tensor: Tensor, x: Tensor) -> Tensor:
    """A tensor with the shape, the dtype and the layout of x."""
    if tensor.shape == x.shape and tensor.stride() == x.stride() and tensor.dtype == x.dtype:
        return tensor
    return torch.empty_like(x).copy_(tensor)


def _numbers(activation: Activation) -> tuple[int, float, float]:
    code = GELU_TANH if activation.name == "gelu" and activation.numbers[0] else CODES[activation.name]
    a, b = (*activation.numbers, 0.0, 0.0)[:2]
    return code, a, b


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
    grid = _grid(x)
    if not grid.whole:
        mean, invstd = measure(x, running, eps=eps)
        z, xhat = normalize(
            x, "x", Affine(mean, invstd, weight, bias), activation, slopes, residual, keep_xhat=keep_xhat
        )
        return z, mean, invstd, xhat
    mean, invstd = torch.empty(2, grid.channels, dtype=torch.float32, device=x.device).unbind()
    z = torch.empty_like(x)
    xhat = torch.empty_like(x) if keep_xhat else None
    code, a, b = _numbers(activation)
    constants = (
        *grid.common, grid.block_rows, grid.block_channels, code, keep_xhat, residual is not None, weight is not None,
        bias is not None, running.mean is not None, slopes is not None and slopes.numel() == 1,
    )  # fmt: skip
    _forward_whole_launch(
        grid.tiles, _key(grid, x, weight, bias, slopes, residual, running.mean, running.var),
        x, z, xhat, residual, mean, invstd, weight, bias, slopes, running.mean, running.var,
        grid.channels, grid.rows, eps, running.momentum, a, b,
        constants=constants, num_warps=8,
    )  # fmt: skip
    return z, mean, invstd, xhat


def measure(x: Tensor, running: Running, *, eps: float, streams: int | None = None) -> tuple[Tensor, Tensor]:
    """The mean and 1/σ of each channel; the running statistics follow."""
    grid = _grid(x, streams)
    mean, invstd = torch.empty(2, grid.channels, dtype=torch.float32, device=x.device).unbind()
    partial = torch.empty(3, grid.parts, grid.channels, dtype=torch.float32, device=x.device)
    constants = (
        *grid.common, grid.block_rows, grid.block_channels, grid.at_once, _STAGES, running.mean is not None,
    )  # fmt: skip
    _measure_launch(
        grid.tiles * grid.parts, _key(grid, x, running.mean, running.var),
        x, mean, invstd, running.mean, running.var, partial, _counters_for(x.device, grid.tiles),
        grid.channels, grid.rows, grid.parts, grid.part, eps, running.momentum,
        constants=constants, num_warps=8, maxnreg=_REGISTERS,
    )  # fmt: skip
    return mean, invstd


def normalize(
    kept: Tensor,
    keeps: Keeps,
    affine: Affine,
    activation: Activation,
    slopes: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    keep_xhat: bool = False,
    streams: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The output z from x or x̂ with the statistics given, and x̂ if wanted."""
    grid = _grid(kept, streams)
    z = torch.empty_like(kept)
    xhat = torch.empty_like(kept) if keep_xhat else None
    code, a, b = _numbers(activation)
    constants = (
        *grid.common, grid.block_rows, grid.block_channels, code, keep_xhat, keeps == "xhat", residual is not None,
        affine.weight is not None, affine.bias is not None, slopes is not None and slopes.numel() == 1,
    )  # fmt: skip
    _normalize_launch(
        grid.tiles * grid.parts * grid.blocks, _key(grid, kept, affine.weight, affine.bias, slopes, residual),
        kept, z, xhat, residual, affine.mean, affine.invstd, affine.weight, affine.bias, slopes,
        grid.channels, grid.rows, grid.parts, grid.blocks, grid.part, a, b,
        constants=constants, num_warps=grid.warps,
    )  # fmt: skip
    return z, xhat


def backward(
    dz: Tensor,
    kept: Tensor,
    keeps: Keeps,
    affine: Affine,
    activation: Activation,
    slopes: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    training: bool,
    joined: Tensor | None = None,
    sums: Sums | None = None,
    streams: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """dx, dγ, dβ, the gradient of a PReLU's slopes, and dy, which is written only where there is a residual.

    ``joined`` is the z of a join whose residual was not kept: its sign is that of y. ``sums`` turns this process's
    Σ dy and Σ dy·x̂ into the means over all.
    """
    grid = _grid(kept, streams)
    code, a, b = _numbers(activation)
    learns = slopes is not None
    totals = torch.empty(2 + learns, grid.channels, dtype=torch.float32, device=kept.device)
    dx = torch.empty_like(kept)
    added = residual if joined is None else joined
    dy = torch.empty_like(kept) if added is not None else dz
    parameters = (affine.mean, affine.invstd, affine.weight, affine.bias, slopes)
    joins = 2 if joined is not None else int(residual is not None)
    has = (joins, affine.weight is not None, affine.bias is not None, learns and slopes.numel() == 1)
    key = _key(grid, kept, dz, affine.weight, affine.bias, slopes, added)
    unit = torch.finfo(kept.dtype).eps / 2
    block = (*grid.common, grid.block_rows, grid.block_channels)
    if grid.whole and sums is None:
        _backward_whole_launch(
            grid.tiles, key, dz, kept, added, dx, dy, *parameters, totals, grid.channels, grid.rows, a, b, unit,
            constants=(*block, code, _KEEPS[keeps], training, *has), num_warps=8,
        )  # fmt: skip
    else:
        partial = torch.empty(2 + learns, grid.parts, grid.channels, dtype=torch.float32, device=kept.device)
        sum_block = (*grid.common, grid.block_rows, grid.block_channels, grid.at_once, _STAGES)
        _reduce_launch(
            grid.tiles * grid.parts, key, dz, kept, added, *parameters, totals, partial,
            _counters_for(kept.device, grid.tiles), grid.channels, grid.rows, grid.parts, grid.part, a, b, unit,
            constants=(*sum_block, code, _KEEPS[keeps], *has), num_warps=8, maxnreg=_REGISTERS,
        )  # fmt: skip
        means, count = totals, float(grid.rows)
        if sums is not None:
            means, count = torch.stack(sums(totals[0], totals[1])), 1.0
        _apply_launch(
            grid.tiles * grid.parts * grid.blocks, key, dz, kept, added, dx, dy, *parameters, means,
            grid.channels, grid.rows, grid.parts, grid.blocks, grid.part, count, a, b, unit,
            constants=(*block, code, _KEEPS[keeps], training, *has), num_warps=grid.warps,
        )  # fmt: skip
    dslopes = None
    if slopes is not None:
        dslopes = totals[2].sum().view(slopes.shape) if slopes.numel() == 1 else totals[2]
    return dx, totals[1], totals[0], dslopes, dy
