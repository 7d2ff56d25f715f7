"""Random sketches by the kernels that fit the tensor: Triton's on a GPU, torch's own ops elsewhere."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowtide.kernels import launches
from lowtide.kernels.chunked_loss import add_product
from lowtide.kernels.reference import randomized as reference
from lowtide.kernels.reference.randomized import Sketch

_FLOAT16_LARGEST = 2.0**15  # of a stored sketch, with room for rounding


def project(x: Tensor, seed: Tensor, sketch: Sketch, dtype: torch.dtype | None = None) -> Tensor:
    """S·x for a matrix x: ``sketch.kept`` rows, in x's dtype or another.

    The same seed has the same S, whatever the columns.
    """
    return _kernels(x, sketch).project(x, seed, sketch, dtype)


def project_scaled(x: Tensor, seed: Tensor, sketch: Sketch) -> tuple[Tensor, Tensor | None]:
    """S·x in x's dtype; in float16 times a power of 2 with which it fits, and that power.

    A sketched row is a sum of many: it can be n/√k times as large as any value of x.
    """
    if x.dtype is not torch.float16:
        return project(x, seed, sketch), None
    sums = project(x, seed, sketch, torch.float32)
    largest = torch.linalg.vector_norm(sums, torch.inf)
    scale = (_FLOAT16_LARGEST / largest).log2().floor().exp2().clamp(max=1.0)
    return sums.mul_(scale).to(x.dtype), scale


def product(a: Tensor, a_scale: Tensor | None, b: Tensor, b_scale: Tensor | None = None) -> Tensor:
    """``a.t() @ b`` of two sketches, without the scales that they have."""
    if a_scale is None or b_scale is None:
        return a.t().mm(b)
    return add_product(None, a.t(), b).div_(a_scale).div_(b_scale).to(a.dtype)


def draw_seed(device: torch.device) -> Tensor:
    """Draw a seed from torch's generator of a device; a recomputation that restores its state draws the same."""
    return torch.randint(2**63 - 1, (), device=device)


def _kernels(x: Tensor, sketch: Sketch) -> Any:
    rows = x.shape[0]
    fast = launches.fast_kernels("randomized", x)
    if fast is None or not x.numel():
        return reference
    if sketch.kind in ("rows", "dct") and -(-rows // sketch.blocks(rows)) > fast.MOST_ROWS:
        return reference  # to draw rows of larger blocks takes a sort, and their transform an FFT: torch has both
    return fast
