"""AdamW with 8-bit states in plain torch: the code, and one step of one parameter.

A state tensor is cut into blocks of 256 values. A block stores its largest magnitude a in float32, and a code c for
each value: x ≈ a·(c/127)⁴ with a sign, or a·(c/255)⁴ without. The fourth power puts as many codes between a/16 and a
as below a/16. So the relative error stays small over many orders of magnitude, and a itself is exact. With a sign it is
1.6% at a, 3% at a/16 and 6% at a/256; without, half of that. Second moments have no sign, and only 0 has the code 0. A
second moment that vanished would leave eps alone to divide by.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 256  # values that share a scale
_PART = 2**15  # values that are stepped together, or more where there would be more than this many parts:
_PARTS = 64


class Hyper(NamedTuple):
    """The numbers of one AdamW step; ``step`` counts from 1."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    decoupled: bool = True  # weight decay as in AdamW; otherwise as in Adam, in the gradient
    maximize: bool = False


class Moments(NamedTuple):
    """The states of one parameter, flat: codes with the scales of their blocks, or float32 where scales are None."""

    exp_avg: Tensor
    exp_avg_sq: Tensor
    exp_avg_scale: Tensor | None = None
    exp_avg_sq_scale: Tensor | None = None


def levels(codes: torch.dtype) -> int:
    """The largest code: 127 for int8, which has a sign, 255 for uint8."""
    return 127 if codes == torch.int8 else 255


def encode(x: Tensor, codes: torch.dtype) -> tuple[Tensor, Tensor]:
    """The codes (int8 or uint8) of a flat float32 tensor, and the scales of its blocks."""
    rows = blocks_as_rows(x)
    scale = rows.abs().amax(1)
    share = rows.abs() / torch.where(scale == 0, 1.0, scale)[:, None]
    level = (share.sqrt().sqrt() * levels(codes) + 0.5).floor()
    level = torch.copysign(level, rows) if codes == torch.int8 else level.maximum((rows > 0).float())
    return level.to(codes).view(-1)[: x.numel()], scale


def decode(code: Tensor, scale: Tensor) -> Tensor:
    """The float32 values of codes."""
    share = blocks_as_rows(code).float() / levels(code.dtype)
    fourth = share.square().square()
    fourth = torch.copysign(fourth, share) if code.dtype == torch.int8 else fourth
    return (fourth * scale[:, None]).view(-1)[: code.numel()]


def step(parameter: Tensor, gradient: Tensor, moments: Moments, hyper: Hyper, noise: Tensor | None = None) -> None:
    """One step of one flat parameter, in place, in float32; with ``noise`` a bfloat16 parameter is rounded by it.

    It steps one part of the parameter after the other, so that temporaries stay small beside the states.
    """
    size = max(_PART, -(-parameter.numel() // (_PARTS * BLOCK)) * BLOCK)
    for start in range(0, parameter.numel(), size):
        values, blocks = slice(start, start + size), slice(start // BLOCK, (start + size) // BLOCK)
        codes = (moments.exp_avg[values], moments.exp_avg_sq[values])
        scales = (None if scale is None else scale[blocks] for scale in moments[2:])
        noise_here = None if noise is None else noise[values]
        _step(parameter[values], gradient[values], Moments(*codes, *scales), hyper, noise_here)


def _step(parameter: Tensor, gradient: Tensor, moments: Moments, hyper: Hyper, noise: Tensor | None) -> None:
    lr, beta1, beta2, eps, decay, count, decoupled, maximize = hyper
    m, v, m_scale, v_scale = moments
    g = gradient.float() if not maximize else -gradient.float()
    p = parameter.float()
    if decoupled:
        p = p * (1 - lr * decay)
    elif decay:
        g = g + decay * p
    first = m if m_scale is None else decode(m, m_scale)
    second = v if v_scale is None else decode(v, v_scale)
    first = first + (g - first) * (1 - beta1)
    second = second * beta2 + g * g * (1 - beta2)
    denominator = second.sqrt() / (1 - beta2**count) ** 0.5 + eps
    p = p - lr / (1 - beta1**count) * (first / denominator)
    if m_scale is None or v_scale is None:
        m.copy_(first)
        v.copy_(second)
    else:
        for value, code, scale in ((first, m, m_scale), (second, v, v_scale)):
            codes, scales = encode(value, code.dtype)
            code.copy_(codes)
            scale.copy_(scales)
    parameter.copy_(p if noise is None else round_by(p, noise))


def round_by(x: Tensor, noise: Tensor) -> Tensor:
    """Round float32 to bfloat16, up or down by 16 random bits (int32): right on average.

    Infinities and nan stay: the bits of an infinity with something added would be those of a nan.
    """
    bits = (x.view(torch.int32) + noise) & -65536
    return torch.where(x.isfinite(), bits.view(torch.float32), x).bfloat16()


def blocks_as_rows(x: Tensor) -> Tensor:
    """Return a flat tensor with a block in each row, the last one filled with zeros."""
    missing = -x.numel() % BLOCK
    return (torch.nn.functional.pad(x, (0, missing)) if missing else x).view(-1, BLOCK)
