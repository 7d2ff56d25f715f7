"""Whether z tells x: the guard of the in-place strategies. The parameters of a layer alone decide.

x̂ from z has the error u(|x̂| + |β/γ|), u the unit roundoff of z. Where some channel's |β/γ| is too large, or γ is 0, the
layer keeps x instead, which costs time and no memory.

On a GPU the answer is read once, at a layer's first step. After that it is asked for every few steps and used when it
has come, so that the GPU is never waited for. Parameters move little in a few steps, and the bounds leave room for it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from lowtide.compat.fake import FakeTensor
from lowtide.kernels.activations import Activation

# The largest |β/γ| at which z still gives x̂ back: its error there is the unit roundoff of z times this.
_LARGEST_RATIO = {torch.float64: 1e6, torch.float32: 32.0, torch.float16: 16.0, torch.bfloat16: 4.0}
_LARGEST_AT_ENDS = 64.0  # the same for a channel's few values of largest |x̂|, in 16 bits
_STEPS = 16  # between two questions, on a GPU


def inverse_is_safe(x: Tensor, weight: Tensor | None, bias: Tensor | None, activation: Activation) -> bool:
    """Whether every channel's x̂ can be had back from z."""
    linear = activation.name in ("identity", "leaky_relu")
    if isinstance(x, FakeTensor) or (weight is None and linear):
        return True
    if not x.is_cuda or weight is None:
        return bool(_all_safe(x.dtype, weight, bias, activation, linear))
    answer = _answers.get(weight)
    if answer is None:
        answer = _answers[weight] = _Answer(bool(_all_safe(x.dtype, weight, bias, activation, linear)))
    elif not torch.cuda.is_current_stream_capturing() and answer.is_due():
        answer.ask(_all_safe(x.dtype, weight, bias, activation, linear))
    return answer.safe


def forget(weight: Tensor | None) -> None:
    """Parameters were loaded: what was known of them says nothing."""
    if weight is not None:
        _answers.pop(weight, None)


class _Answer:
    """What is known of a layer, and the question that is under way."""

    def __init__(self, safe: bool) -> None:
        self.safe = safe
        self._steps = 0
        self._flag: Tensor | None = None
        self._came: torch.cuda.Event | None = None

    def is_due(self) -> bool:
        """Count a step; take over an answer when its steps are over. It came long ago: nothing is waited for."""
        self._steps += 1
        if self._steps % _STEPS:
            return False
        if self._came is not None and self._flag is not None:
            self._came.synchronize()
            self.safe = bool(self._flag)
        return True

    def ask(self, safe: Tensor) -> None:
        if self._flag is None:
            self._flag = torch.empty((), dtype=torch.bool, pin_memory=True)
            self._came = torch.cuda.Event()
        assert self._came is not None
        self._flag.copy_(safe, non_blocking=True)
        self._came.record()


_answers: Any = WeakIdKeyDictionary()  # parameter -> _Answer


def _all_safe(
    dtype: torch.dtype, weight: Tensor | None, bias: Tensor | None, activation: Activation, linear: bool
) -> Tensor:
    """One truth value, on the parameters' device.

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
