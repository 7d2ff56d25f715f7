"""Composite ops captured as the plain step runs them, in place of torch's decompositions for tracing.

While AOTAutograd traces, torch replaces some composite ops by its own Python code. That code rounds otherwise
(resampling, margin losses) or draws other random numbers (dropout).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lowtide.compat.operators import decompositions_of, replace_decompositions
from lowtide.tracing.process_patch import ProcessPatch

_aten: Any = torch.ops.aten
_REPLACED = ("upsample_", "_upsample_", "multi_margin_loss", "multilabel_margin_loss_forward")


def _use_plain_kernels() -> Callable[[], None]:
    dropout = _aten.dropout.default
    by_fused_op = {key: _dropout_by(fused) for key, fused in decompositions_of(dropout).items()}
    own = replace_decompositions({**_in_cpp(), dropout: by_fused_op})

    def restore() -> None:
        replace_decompositions(own)

    return restore


@cache  # each planned step enters and leaves the patch
def _in_cpp() -> dict[Any, dict[Any, Any]]:
    """Replaced ops, each without kernels in Python."""
    packets = (getattr(_aten, name) for name in dir(_aten) if name.startswith(_REPLACED))
    return {getattr(packet, name): {} for packet in packets for name in packet.overloads()}


def _dropout_by(fused: Callable[..., Any]) -> Callable[..., Any]:
    """Dropout as the plain step's, by the fused op where that gives the same bits.

    The fused op keeps one byte an element. But in half precision it does not round its scale, and at p=1 it draws
    numbers.
    """

    def dropout(input: Tensor, p: float, train: bool | None) -> Tensor:
        if not train or p == 0 or (p < 1 and (input.itemsize >= 4 or input.device.type != "cpu")):
            return fused(input, p, train)
        if p == 1:
            return input * torch.zeros((), dtype=input.dtype, device=input.device)
        if input.is_contiguous():
            return input * torch.empty_like(input).bernoulli_(1 - p).div_(1 - p)
        # Captured, bernoulli draws in another order than in place. The fused mask is laid out as its input.
        _, mask = _aten.native_dropout(input.detach(), p, train)
        return input * mask.to(input.dtype).div_(1 - p)

    return dropout


plain_composites = ProcessPatch(_use_plain_kernels)
"""Trace composite ops by their C++ kernels, which the plain step runs too."""
