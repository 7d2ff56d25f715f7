"""Strategies of a batch norm with its activation, by what backward keeps, and the settings of a call."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from lowtide.errors import LowtideError
from lowtide.kernels.activations import Activation
from lowtide.kernels.reference.batchnorm import Keeps
from lowtide.nn.statistics import Statistics

Strategy = Literal["auto", "standard", "checkpoint", "checkpoint_xhat", "inplace", "inplace2"]
STRATEGIES: tuple[str, ...] = get_args(Strategy)
KEEPS: dict[str, Keeps] = {
    "standard": "x",
    "checkpoint": "x",
    "checkpoint_xhat": "xhat",
    "inplace": "z",
    "inplace2": "z",
}


def resolve(
    strategy: str, act: Activation, x: Tensor | None = None, *, joined: bool = False, where: object = ""
) -> str:
    """The strategy that "auto" stands for, for this input; one that cannot be is an error."""
    if strategy not in STRATEGIES:
        raise LowtideError(f"Unknown strategy {strategy!r}", where=str(where), hint=f"Known: {', '.join(STRATEGIES)}.")
    if strategy == "auto":
        # In 16 bits z is too coarse to give γ's gradient back. On a CPU, having y back costs more than computing it.
        fast = x is not None and x.is_cuda and x.dtype is torch.float32
        return "inplace" if fast and act.name == "leaky_relu" and act.invertible and not joined else "checkpoint"
    hint = "Use strategy='checkpoint': it keeps one buffer too."
    if joined and strategy not in ("standard", "checkpoint"):
        raise LowtideError(f"A join with a residual cannot use strategy={strategy!r}", where=str(where), hint=hint)
    if strategy.startswith("inplace") and not act.invertible:
        message = f"{act} has no inverse, so strategy={strategy!r} cannot have y back"
        raise LowtideError(message, where=str(where), hint=hint)
    return strategy


class Spec(NamedTuple):
    """All of a call that is not a tensor."""

    activation: Activation
    strategy: str
    training: bool
    eps: float
    rebuild: bool
    group: Any
    statistics: Statistics | None
    where: object
