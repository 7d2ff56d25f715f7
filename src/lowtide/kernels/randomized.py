"""Random sketches by the kernels that fit the tensor: Triton's on a GPU, torch's own ops elsewhere."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lowtide.kernels import launches
from lowtide.kernels.reference import randomized as reference
from lowtide.kernels.reference.randomized import Sketch

_FAST = (torch.float32, torch.float16, torch.bfloat16)


def project(x: Tensor, seed: Tensor, sketch: Sketch) -> Tensor:
    """S·x for a matrix x: ``sketch.kept`` rows, in x's dtype. The same seed has the same S, whatever the columns."""
    fast = _fast_kernels(x, sketch)
    return (fast or reference).project(x, seed, sketch)


def draw_seed(device: torch.device) -> Tensor:
    """A seed from torch's generator of a device: a recomputed forward pass, with its state put back, has it again."""
    return torch.randint(2**63 - 1, (), device=device)


def _fast_kernels(x: Tensor, sketch: Sketch) -> Any:
    runs = launches.watcher is not None or not isinstance(x, FakeTensor)  # a watcher keeps fake tensors from a launch
    if not (x.is_cuda and x.dtype in _FAST and x.numel() and runs):
        return None
    fast = _triton_kernels()
    if fast is not None and sketch.kind in ("rows", "dct"):
        # Of larger blocks, a sort draws the rows, and an FFT is the transform: torch has both.
        rows = x.shape[0]
        return fast if -(-rows // sketch.blocks(rows)) <= fast.MOST_ROWS else None
    return fast


@cache
def _triton_kernels() -> Any:
    try:
        from lowtide.kernels.triton import randomized
    except ImportError:
        return None
    return randomized
