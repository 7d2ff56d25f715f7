"""The activations that lowtide fuses behind a batch norm: what they are, and which can be undone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide.errors import LowtideError
from lowtide.kernels.pointwise import POINTWISE, read

_aten: Any = torch.ops.aten


@dataclass(frozen=True)
class Activation:
    """An activation z = φ(y) with its numbers, such as a slope.

    ``module`` is set for one that lowtide has no formula for, or that learns (PReLU): it is called as it is.

    >>> Activation.of("leaky_relu"), Activation.of(nn.ELU(alpha=0.5)).invertible
    (leaky_relu(0.01), True)
    """

    name: str
    numbers: tuple[float, ...] = ()
    module: nn.Module | None = None

    @classmethod
    def of(cls, activation: str | nn.Module | Activation | None) -> Activation:
        """Read a name, a module of ``torch.nn``, or any other pointwise module."""
        if isinstance(activation, Activation):
            return activation
        if activation is None:
            return cls("identity")
        if isinstance(activation, str):
            if activation == "prelu":
                return cls(activation, (), nn.PReLU())
            if activation not in _BACKWARDS:
                raise LowtideError(f"Unknown activation {activation!r}", hint=f"Known: {', '.join(_KNOWN)}.")
            return cls(activation, POINTWISE[activation].defaults)
        if not isinstance(activation, nn.Module):
            raise LowtideError(
                f"{activation!r} is not an activation",
                hint=f"Give a module, or one of {', '.join(_KNOWN)}.",
            )
        if type(activation) is nn.PReLU:
            return cls("prelu", (), activation)
        name, numbers = read(activation) or ("", ())
        return cls(name, numbers) if name in _BACKWARDS else cls("module", (), activation)

    @property
    def invertible(self) -> bool:
        """Whether y can be had back from z. ReLU and others that fold cannot; PReLU may learn to."""
        return self.name in _INVERSES and all(number > 0 for number in self.numbers)

    @property
    def slope_from_sign(self) -> bool:
        """Whether the sign of z is all that φ' depends on."""
        return self.name == "relu" or (self.name == "leaky_relu" and self.numbers[0] > 0)

    @property
    def may_overwrite(self) -> bool:
        """Whether torch's backward needs z alone, so that z may take the place of y."""
        return self.name in _FROM_RESULT and all(number > 0 for number in self.numbers)

    @property
    def learned(self) -> Tensor | None:
        """PReLU's slopes."""
        return self.module.weight if isinstance(self.module, nn.PReLU) else None

    def __call__(self, y: Tensor) -> Tensor:
        """z, as torch computes it."""
        return self.module(y) if self.module is not None else POINTWISE[self.name].function(y, *self.numbers)

    def write(self, y: Tensor, slopes: Tensor | None = None) -> Tensor:
        """z, over y where torch can."""
        if slopes is not None:
            return _aten._prelu_kernel(y, _per_channel(slopes, y))
        op = POINTWISE[self.name]
        return (op.in_place or op.function)(y, *self.numbers)

    def backward(
        self, dz: Tensor, y: Tensor, slopes: Tensor | None = None, *, write: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """dL/dy, and dL/dslopes of a PReLU. ``write``: over y, where torch can."""
        if slopes is not None:
            dy, full = _aten._prelu_kernel_backward(dz, y, _per_channel(slopes, y))
            return dy, full.sum_to_size(_per_channel(slopes, y).shape).view(slopes.shape).to(slopes.dtype)
        if write and self.name in _BACKWARDS_OVER and dz.dtype == y.dtype and dz.stride() == y.stride():
            return _BACKWARDS_OVER[self.name](dz, y, *self.numbers), None
        return _BACKWARDS[self.name](dz, y, *self.numbers), None

    def inverse(self, z: Tensor) -> Tensor:
        """Y from z, in float32 at least; where z is saturated, the last y that can be told from the end."""
        wide = z.float() if z.dtype in (torch.float16, torch.bfloat16) else z
        info = torch.finfo(z.dtype)
        least = max(info.tiny * info.eps, torch.finfo(wide.dtype).tiny)  # the smallest z > 0
        return _INVERSES[self.name](wide, _Ends(info.eps / 2, least), *self.numbers)

    def __repr__(self) -> str:
        numbers = ", ".join(f"{number:g}" for number in self.numbers)
        shown = type(self.module).__name__ if self.name == "module" else self.name
        return f"{shown}({numbers})" if numbers else shown


def _per_channel(slopes: Tensor, y: Tensor) -> Tensor:
    return slopes.view(1, -1, *[1] * (y.dim() - 2)).to(y.dtype)


class _Ends(NamedTuple):
    """How near z can be to the ends of φ's range: 1 less a unit roundoff, and the least number above 0."""

    unit: float
    least: float


def _elu_inverse(z: Tensor, ends: _Ends, alpha: float) -> Tensor:
    return torch.where(torch.signbit(z), torch.log1p((z / alpha).clamp(min=ends.unit - 1)), z)


def _celu_inverse(z: Tensor, ends: _Ends, alpha: float) -> Tensor:
    return alpha * _elu_inverse(z / alpha, ends, 1.0)


def _leaky_inverse(z: Tensor, ends: _Ends, slope: float) -> Tensor:
    return F.leaky_relu(z, 1 / slope)


def _tanh_inverse(z: Tensor, ends: _Ends) -> Tensor:
    return torch.atanh(z.clamp(ends.unit - 1, 1 - ends.unit))


def _sigmoid_inverse(z: Tensor, ends: _Ends) -> Tensor:
    return torch.logit(z.clamp(ends.least, 1 - ends.unit))


def _softplus_inverse(z: Tensor, ends: _Ends, beta: float, threshold: float) -> Tensor:
    scaled = beta * z.clamp(min=ends.least)
    return torch.where(scaled > threshold, z, torch.log(torch.expm1(scaled)) / beta)


_FROM_RESULT = ("identity", "relu", "leaky_relu", "elu", "celu", "tanh", "sigmoid")

_BACKWARDS: dict[str, Callable[..., Tensor]] = {
    "identity": lambda dz, y: dz,
    "relu": lambda dz, y: _aten.threshold_backward(dz, y, 0),
    "leaky_relu": lambda dz, y, slope: _aten.leaky_relu_backward(dz, y, slope, False),
    "elu": lambda dz, y, alpha: _aten.elu_backward(dz, alpha, 1, 1, False, y),
    "celu": lambda dz, y, alpha: _aten.elu_backward(dz, alpha, 1, 1 / alpha, False, y),
    "silu": lambda dz, y: _aten.silu_backward(dz, y),
    "gelu": lambda dz, y, tanh: _aten.gelu_backward(dz, y, approximate="tanh" if tanh else "none"),
    "hardswish": lambda dz, y: _aten.hardswish_backward(dz, y),
    "tanh": lambda dz, y: _aten.tanh_backward(dz, torch.tanh(y)),
    "sigmoid": lambda dz, y: _aten.sigmoid_backward(dz, torch.sigmoid(y)),
    "softplus": lambda dz, y, beta, threshold: _aten.softplus_backward(dz, y, beta, threshold),
}

_KNOWN = (*_BACKWARDS, "prelu")

_BACKWARDS_OVER: dict[str, Callable[..., Tensor]] = {
    "relu": lambda dz, y: _aten.threshold_backward(dz, y, 0, grad_input=y),
    "leaky_relu": lambda dz, y, slope: _aten.leaky_relu_backward(dz, y, slope, False, grad_input=y),
    "elu": lambda dz, y, alpha: _aten.elu_backward(dz, alpha, 1, 1, False, y, grad_input=y),
    "silu": lambda dz, y: _aten.silu_backward(dz, y, grad_input=y),
    "gelu": lambda dz, y, tanh: _aten.gelu_backward(dz, y, approximate="tanh" if tanh else "none", grad_input=y),
    "softplus": lambda dz, y, beta, threshold: _aten.softplus_backward(dz, y, beta, threshold, grad_input=y),
}

_INVERSES: dict[str, Callable[..., Tensor]] = {
    "identity": lambda z, ends: z,
    "leaky_relu": _leaky_inverse,
    "elu": _elu_inverse,
    "celu": _celu_inverse,
    "tanh": _tanh_inverse,
    "sigmoid": _sigmoid_inverse,
    "softplus": _softplus_inverse,
}
