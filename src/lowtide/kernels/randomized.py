"""Random sketches by the kernels that fit the tensor: Triton's on a GPU, torch's own ops elsewhere."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowtide.kernels import launches
from lowtide.kernels.reference import randomized as reference
from lowtide.kernels.reference.randomized import Sketch


def project(x: Tensor, seed: Tensor, sketch: Sketch) -> Tensor:
    """S·x for a matrix x: ``sketch.kept`` rows, in x's dtype. The same seed has the same S, whatever the columns."""
    fast = _fast_kernels(x, sketch)
    return (fast or reference).project(x, seed, sketch)


def draw_seed(device: torch.device) -> Tensor:
    """A seed from torch's generator of a device: a recomputed forward pass, with its state put back, has it again."""
    return torch.randint(2**63 - 1, (), device=device)


def _fast_kernels(x: Tensor, sketch: Sketch) -> Any:
    if not (launches.can_run(x) and x.numel()):
        return None
    fast = launches.triton_kernels("randomized")
    if fast is not None and sketch.kind in ("rows", "dct"):
        # Of larger blocks, a sort draws the rows, and an FFT is the transform: torch has both.
        rows = x.shape[0]
        return fast if -(-rows // sketch.blocks(rows)) <= fast.MOST_ROWS else None
    return fast
