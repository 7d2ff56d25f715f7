# pyright: basic, reportArgumentType=false, reportGeneralTypeIssues=false, reportPossiblyUnboundVariable=false, reportCallIssue=false
"""A step of AdamW with 8-bit states in Triton: all parameters in one launch, each byte once.

For float32 parameters and gradients that is 16 bytes a parameter: 8 for p, read and written, 4 for g, 4 for codes.
Scales add 1/16. AdamW with float32 states moves 28. The formulas are the reference's. The code of a block
needs its largest magnitude, which one program finds in registers: a row of its tile is a block.

A launch takes an address table instead of tensors: a launch for each of hundreds of parameters would take longer than
the work. The table is sent again only when an address changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowtide.kernels import launches
from lowtide.kernels.adamw8bit import Entry
from lowtide.kernels.reference.adamw8bit import BLOCK, Hyper

_ROWS = 4  # blocks of a tile
_TILES = 8  # tiles that a program takes one after the other
_CHUNK = _ROWS * _TILES * BLOCK
_COLUMNS = 8  # of the address table: p, g, both codes, both scales, the count, the number of the tensor


@triton.jit(do_not_specialize=["seed"])
def adamw8bit(
    table, chunks, new1, beta2, new2, eps, keep, decay, rate, unbias, seed,
    P: tl.constexpr, G: tl.constexpr, EIGHT: tl.constexpr, ALIGNED: tl.constexpr, MAXIMIZE: tl.constexpr,
    ROUNDS: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One chunk of one tensor: ``keep`` is 1 - lr·decay (AdamW), ``rate`` lr/(1-β1ᵗ), ``unbias`` 1/sqrt(1-β2ᵗ).

    ``new1`` and ``new2`` are 1-β1 and 1-β2: from β in float32 they would have five digits right.
    """
    program = tl.program_id(0)
    row = table + 8 * tl.load(chunks + 2 * program)
    start = tl.load(chunks + 2 * program + 1)
    p_at = tl.load(row).to(tl.pointer_type(P))
    g_at = tl.load(row + 1).to(tl.pointer_type(G))
    count = tl.load(row + 6)
    number = tl.load(row + 7)
    if EIGHT:
        m_at = tl.load(row + 2).to(tl.pointer_type(tl.int8))
        v_at = tl.load(row + 3).to(tl.pointer_type(tl.uint8))
        m_scales = tl.load(row + 4).to(tl.pointer_type(tl.float32))
        v_scales = tl.load(row + 5).to(tl.pointer_type(tl.float32))
    else:
        m_at = tl.load(row + 2).to(tl.pointer_type(tl.float32))
        v_at = tl.load(row + 3).to(tl.pointer_type(tl.float32))
    if ALIGNED:  # else the compiler could not load 16 bytes at a time
        p_at = tl.multiple_of(p_at, 16)
        g_at = tl.multiple_of(g_at, 16)
        m_at = tl.multiple_of(m_at, 16)
        v_at = tl.multiple_of(v_at, 16)
        count = tl.multiple_of(count, 16)
        start = tl.multiple_of(start, 16)
    for tile in range(TILES):
        first = start + tile * (ROWS * WIDTH)
        if first < count:
            at = first + tl.arange(0, ROWS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
            inside = at < count
            p = tl.load(p_at + at, inside, 0.0).to(tl.float32)
            g = tl.load(g_at + at, inside, 0.0).to(tl.float32)
            m = tl.load(m_at + at, inside, 0).to(tl.float32)
            v = tl.load(v_at + at, inside, 0).to(tl.float32)
            blocks = first // WIDTH + tl.arange(0, ROWS)
            if EIGHT:
                there = blocks * WIDTH < count
                m_scale = tl.load(m_scales + blocks, there, 0.0)
                v_scale = tl.load(v_scales + blocks, there, 0.0)
                share = m * (1.0 / 127)
                square = share * share
                m = tl.where(m < 0, -square * square, square * square) * m_scale[:, None]
                share = v * (1.0 / 255)
                square = share * share
                v = square * square * v_scale[:, None]
            if MAXIMIZE:
                g = -g
            g += decay * p
            m += (g - m) * new1
            v = v * beta2 + g * g * new2
            root = tl.sqrt(v)
            p = p * keep - rate * (m / (root * unbias + eps))
            if ROUNDS:
                bits = tl.randint(seed + number.to(tl.int32), at.to(tl.int32)).to(tl.int32, bitcast=True) & 0xFFFF
                lifted = (p.to(tl.int32, bitcast=True) + bits) & -65536
                p = tl.where(tl.abs(p) < float("inf"), lifted.to(tl.float32, bitcast=True), p)
            tl.store(p_at + at, p.to(P), inside)
            if EIGHT:
                size = tl.where(inside, tl.abs(m), 0.0)
                m_scale = tl.max(size, 1)
                level = tl.sqrt(tl.sqrt(size / tl.where(m_scale == 0, 1.0, m_scale)[:, None])) * 127 + 0.5
                code = level.to(tl.int32)
                tl.store(m_at + at, tl.where(m < 0, -code, code).to(tl.int8), inside)
                root = tl.where(inside, root, 0.0)
                v_root = tl.max(root, 1)
                level = tl.sqrt(root / tl.where(v_root == 0, 1.0, v_root)[:, None]) * 255 + 0.5
                code = tl.maximum(level.to(tl.int32), (v > 0).to(tl.int32))
                tl.store(v_at + at, code.to(tl.uint8), inside)
                tl.store(m_scales + blocks, m_scale, there)
                tl.store(v_scales + blocks, tl.max(tl.where(inside, v, 0.0), 1), there)
            else:
                tl.store(m_at + at, m, inside)
                tl.store(v_at + at, v, inside)


class Launch(NamedTuple):
    """Parameters of one kind, where they are: dtypes, 8-bit or not, aligned or not, device."""

    kind: tuple[Any, ...]
    table: Tensor
    chunks: Tensor


def step(entries: Sequence[Entry], hyper: Hyper, *, seed: int | None = None) -> list[Launch] | None:
    """Step all parameters in as many launches as there are kinds of them, and give these; none where it is watched."""
    kinds: dict[tuple[Any, ...], list[tuple[int, Entry]]] = {}
    watched = launches.watcher is not None
    for number, entry in enumerate(entries):
        p, g, moments = entry
        aligned = not watched and _aligned(entry)
        kind = (p.dtype, g.dtype, moments.exp_avg_scale is not None, aligned, p.device)
        kinds.setdefault(kind, []).append((number, entry))
    if not watched:
        prepared = [_prepare(kind, members) for kind, members in kinds.items()]
        launch(prepared, hyper, seed=seed)
        return prepared
    for kind, members in kinds.items():
        tensors: list[Tensor | None] = [t for _, (p, g, moments) in members for t in (p, g, *moments)]
        again = partial(_again, kind, members, hyper, seed)
        launches.show("adamw8bit", tensors, again)
    return None


def _again(kind: tuple[Any, ...], members: list[tuple[int, Entry]], hyper: Hyper, seed: int | None) -> None:
    launch([_prepare(kind, members)], hyper, seed=seed)


def launch(prepared: Sequence[Launch], hyper: Hyper, *, seed: int | None = None) -> None:
    """Step the parameters that launches were prepared for."""
    decay = hyper.lr * hyper.weight_decay
    for (p_dtype, g_dtype, eight, aligned, device), table, chunks in prepared:
        with torch.cuda.device(device) if device.type == "cuda" else torch.no_grad():
            adamw8bit[(len(chunks),)](
                table, chunks, 1 - hyper.beta1, hyper.beta2, 1 - hyper.beta2, hyper.eps,
                1.0 - decay if hyper.decoupled else 1.0,
                0.0 if hyper.decoupled else float(hyper.weight_decay),
                hyper.lr / (1 - hyper.beta1**hyper.step), (1 - hyper.beta2**hyper.step) ** -0.5,
                0 if seed is None else seed,
                P=_TYPES[p_dtype], G=_TYPES[g_dtype], EIGHT=eight, ALIGNED=aligned, MAXIMIZE=hyper.maximize,
                ROUNDS=seed is not None and p_dtype == torch.bfloat16, ROWS=_ROWS, TILES=_TILES, WIDTH=BLOCK,
                num_warps=4,
            )  # fmt: skip


def _prepare(kind: tuple[Any, ...], members: list[tuple[int, Entry]]) -> Launch:
    device = kind[-1]
    addresses = tuple(
        address
        for number, (p, g, moments) in members
        for address in (
            p.data_ptr(),
            g.data_ptr(),
            *(0 if t is None else t.data_ptr() for t in moments),
            p.numel(),
            number,
        )
    )
    return Launch(kind, _sent(addresses, device), _chunks(tuple(e.parameter.numel() for _, e in members), device))


def _aligned(entry: Entry) -> bool:
    p, g, moments = entry
    bits = p.numel() | p.data_ptr() | g.data_ptr() | moments.exp_avg.data_ptr() | moments.exp_avg_sq.data_ptr()
    return bits % 16 == 0


_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@lru_cache(maxsize=64)
def _sent(addresses: tuple[int, ...], device: torch.device) -> Tensor:
    """The address table on the device. The copy is not waited for: the driver has the numbers when it returns."""
    return torch.tensor(addresses, dtype=torch.int64).view(-1, _COLUMNS).to(device, non_blocking=True)


@lru_cache(maxsize=64)
def _chunks(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the tensor and the first value of each program."""
    rows = [(index, start) for index, size in enumerate(sizes) for start in range(0, size, _CHUNK)]
    return torch.tensor(rows, dtype=torch.int64).view(-1, 2).to(device, non_blocking=True)
