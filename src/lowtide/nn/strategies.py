"""Strategies of a batch norm with its activation: what backward keeps, and where z determines x."""

from __future__ import annotations

import weakref
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from lowtide.compat.fake import FakeTensor
from lowtide.errors import LowtideError
from lowtide.kernels.activations import Activation
from lowtide.kernels.reference.batchnorm import Keeps
from lowtide.nn.hidden_writes import CheckedCalls
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
    """Return the strategy that "auto" stands for, for this input; refuse an impossible one."""
    if strategy not in STRATEGIES:
        raise LowtideError(f"Unknown strategy {strategy!r}", where=str(where), hint=f"Known: {', '.join(STRATEGIES)}.")
    if strategy == "auto":
        # In 16 bits z is too coarse for the gradient of γ. On a CPU, φ⁻¹ costs more than computing y from x.
        fast = x is not None and x.is_cuda and x.dtype is torch.float32
        return "inplace" if fast and act.name == "leaky_relu" and act.invertible and not joined else "checkpoint"
    hint = "Use strategy='checkpoint': it keeps one buffer too."
    if joined and strategy not in ("standard", "checkpoint"):
        raise LowtideError(f"A join with a residual cannot use strategy={strategy!r}", where=str(where), hint=hint)
    if strategy.startswith("inplace") and not act.invertible:
        raise LowtideError(f"{act} has no inverse, which strategy={strategy!r} needs", where=str(where), hint=hint)
    return strategy


class Spec(NamedTuple):
    """The settings of a call that are not tensors."""

    activation: Activation
    strategy: str
    training: bool
    eps: float
    rebuild: bool
    group: Any
    statistics: Statistics | None
    calls: CheckedCalls
    where: object


# -- does z determine x? -----------------------------------------------------------------------------------
#
# x̂ from z has the error u(|x̂| + |β/γ|), u the unit roundoff of z. Where a channel's |β/γ| is too large, or γ is 0, a
# layer with an in-place strategy keeps x instead. That costs time and no memory.

# The largest |β/γ| at which z still determines x̂: its error there is the unit roundoff of z times this.
_LARGEST_RATIO = {torch.float64: 1e6, torch.float32: 32.0, torch.float16: 16.0, torch.bfloat16: 4.0}
_LARGEST_AT_ENDS = 64.0  # the same for a channel's few values of largest |x̂|, in 16 bits
_STEPS = 16  # between two questions, on a GPU


class InverseGuard:
    """Tells whether a layer's parameters allow to invert z; the layer holds it.

    On a GPU the first step waits for the answer. Later the guard asks every few steps and reads the answer some steps
    after, without a sync. The bounds leave room for the little that parameters move meanwhile.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Ask anew at the next step: parameters were loaded."""
        self._weight: weakref.ref[Tensor] | None = None
        self._safe = False
        self._steps = 0
        self._answer: tuple[Tensor, torch.cuda.Event] | None = None  # in pinned memory, and the event of its arrival

    def is_safe(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, activation: Activation) -> bool:
        """Tell whether every channel's x̂ can be computed from z."""
        linear = activation.name in ("identity", "leaky_relu")
        if isinstance(x, FakeTensor) or (weight is None and linear):
            return True
        if not x.is_cuda or weight is None or self._weight is None or self._weight() is not weight:
            self.forget()
            self._weight = None if weight is None else weakref.ref(weight)
            self._safe = bool(_all_safe(x.dtype, weight, bias, activation, linear))
        elif not torch.cuda.is_current_stream_capturing():
            self._steps += 1
            if self._steps % _STEPS == 0:
                self._ask(_all_safe(x.dtype, weight, bias, activation, linear))
        return self._safe

    def _ask(self, safe: Tensor) -> None:
        """Take over the last answer, which came long ago, and start to copy the next one."""
        if self._answer is None:
            self._answer = torch.empty((), dtype=torch.bool, pin_memory=True), torch.cuda.Event()
            flag, came = self._answer
        else:
            flag, came = self._answer
            came.synchronize()
            self._safe = bool(flag)
        flag.copy_(safe, non_blocking=True)
        came.record()


def _all_safe(
    dtype: torch.dtype, weight: Tensor | None, bias: Tensor | None, activation: Activation, linear: bool
) -> Tensor:
    """Return one truth value, on the parameters' device.

    Rounding z by a unit u shifts x̂ by u·|z|/(φ'(y)·|γ|): far too much where φ is saturated. A channel is within 3|γ|
    of its β, but for a few values.
    """
    largest = _LARGEST_RATIO[dtype]
    with torch.no_grad():
        gamma = torch.ones(1) if weight is None else weight.detach().abs()
        beta = torch.zeros_like(gamma) if bias is None else bias.detach()
        safe = (gamma * largest > beta.abs()).all()
        if linear:
            return safe
        ends = torch.stack([beta - 3 * gamma, beta + 3 * gamma]).double()
        slopes, _ = activation.backward(torch.ones_like(ends), ends)
        rounded = activation(ends).abs().clamp(min=torch.finfo(dtype).tiny)  # smaller numbers lose bits
        return safe & (rounded < max(largest, _LARGEST_AT_ENDS) * gamma * slopes).all()
