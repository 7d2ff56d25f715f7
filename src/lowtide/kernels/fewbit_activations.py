"""Activations as functions of one number: torch's own op, where it bends, and which are straight between bends.

A *curve* has a derivative that a few bits approximate. A *gate* is straight on both sides of its bends, and one of the
two slopes is that of all its outer or all its inner part: one bit says which, and the gradient is torch's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide.errors import LowtideError
from lowtide.kernels.pointwise import POINTWISE, read

_aten: Any = torch.ops.aten


@dataclass(frozen=True)
class Curve:
    """An activation y = f(x) with its numbers, such as a slope.

    >>> Curve.of("gelu"), Curve.of(nn.ELU(alpha=0.5)), Curve.of(nn.ReLU()).is_gate
    (gelu, elu(0.5), True)
    """

    name: str
    numbers: tuple[float, ...] = ()
    function: Callable[[Tensor], Tensor] | None = field(default=None, repr=False)  # of one that has no name

    @classmethod
    def of(cls, activation: object) -> Curve:
        """Read a name, a module of ``torch.nn``, a function of ``torch.nn.functional``, or any function of one number.

        A function that lowtide does not know must act on each element alone; its derivative is found by autograd.
        """
        if isinstance(activation, Curve):
            return activation
        if isinstance(activation, str):
            if activation not in _NAMES:
                raise LowtideError(f"Unknown activation {activation!r}", hint=f"Known: {', '.join(_NAMES)}.")
            return cls(activation, POINTWISE[activation].defaults)
        found = read_module(activation)
        if found is not None:
            return found
        if isinstance(activation, nn.Module) and next(activation.parameters(), None) is not None:
            raise LowtideError(
                f"{type(activation).__name__} learns, and the gradient of what it learns needs the whole input",
                hint="Few-bit backward is for activations without parameters.",
            )
        if not callable(activation) or isinstance(activation, type):
            raise LowtideError(f"{activation!r} is not an activation", hint="Give a module, a name or a function.")
        for name in _NAMES:
            if activation in (POINTWISE[name].function, getattr(F, name, None), getattr(torch, name, None)):
                return cls(name, POINTWISE[name].defaults)
        curve = cls(
            getattr(activation, "__name__", type(activation).__name__), (), cast(Callable[[Tensor], Tensor], activation)
        )
        if not curve._acts_on_each_element():
            raise LowtideError(
                f"{curve} does not act on each element alone, so a slope for each is not its derivative",
                hint="Few-bit backward is for functions of one number, the same one in every call.",
            )
        x = torch.tensor([-2.0, -0.1, 0.1, 2.0])
        if not torch.isfinite(curve(x) * curve.slope(x)).all():
            raise LowtideError(f"{curve} is not finite for all inputs", hint="Activations are: nn.GELU, nn.SiLU, …")
        return curve

    def __call__(self, x: Tensor) -> Tensor:
        """Y, as torch computes it."""
        return self.function(x) if self.function is not None else POINTWISE[self.name].function(x, *self.numbers)

    def write(self, x: Tensor) -> Tensor:
        """Y over x, by torch's own op in place where it has one."""
        in_place = None if self.function is not None else POINTWISE[self.name].in_place
        return x.copy_(self(x)) if in_place is None else in_place(x, *self.numbers)

    def slope(self, x: Tensor) -> Tensor:
        """f'(x), by torch's own derivative."""
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(self(x).sum(), x)[0]

    @property
    def bends(self) -> tuple[float, ...]:
        """Where f' jumps or bends."""
        return _BENDS[self.name](*self.numbers) if self.function is None and self.name in _BENDS else ()

    @property
    def is_gate(self) -> bool:
        """Whether one bit says all of f'."""
        return self.function is None and self.name in _GATES

    @property
    def gate(self) -> Gate:
        """How a gate opens and closes."""
        return _GATES[self.name](*self.numbers)

    def _acts_on_each_element(self) -> bool:
        """As far as some numbers show it, together and one by one."""
        x = torch.linspace(-2.0, 2.0, 9, dtype=torch.float64).view(3, 3)
        try:
            with torch.no_grad():
                together, alone = self(x.clone()), [self(value.clone()) for value in x.view(9, 1, 1)]
        except (RuntimeError, ValueError, IndexError, TypeError):  # it wants certain shapes, or more arguments
            return False
        return together.shape == x.shape and torch.allclose(
            together.reshape(9), torch.cat(alone).reshape(9), equal_nan=True
        )

    def __repr__(self) -> str:
        if self.name == "gelu":
            return "gelu(tanh)" if self.numbers[0] else "gelu"
        numbers = ", ".join(f"{number:g}" for number in self.numbers)
        return f"{self.name}({numbers})" if numbers else self.name


class Gate(NamedTuple):
    """The slope ``on`` where a gate is open, else ``off``; ``backward`` is torch's own.

    Open are: kind 0, all between low and high (of NaN, nothing); kind 1, the same with NaN; kind 2, all but that, and
    NaN. A bound of NaN is none.
    """

    backward: Callable[[Tensor, Tensor], Tensor]  # of dy and x
    kind: int
    low: float
    high: float
    on: float = 1.0
    off: float = 0.0
    open_at: float = math.inf  # some x where it is open, and one where it is closed
    closed_at: float = -math.inf


def read_module(module: object, kind: type | None = None) -> Curve | None:
    """The curve of a module of ``torch.nn``; None of any other: a subclass may do as it likes, if not said otherwise.

    >>> read_module(nn.Softplus(beta=2)), read_module(nn.PReLU())
    (softplus(2, 20), None)
    """
    name, numbers = read(module, kind) or ("", ())
    return Curve(name, numbers) if name in _NAMES else None


def is_in_place(module: nn.Module) -> bool:
    """Whether a module writes its result over its input."""
    return bool(getattr(module, "inplace", False))


_BENDS: dict[str, Callable[..., tuple[float, ...]]] = {
    "elu": lambda alpha: (0.0,),
    "selu": lambda: (0.0,),
    "celu": lambda alpha: (0.0,),
    "softplus": lambda beta, threshold: (threshold / beta,),
    "hardswish": lambda: (-3.0, 3.0),
    "softsign": lambda: (0.0,),
}


def _threshold(threshold: float = 0.0, value: float = 0.0) -> Gate:
    return Gate(lambda dy, x: _aten.threshold_backward(dy, x, threshold), 1, threshold, math.nan)


def _leaky_relu(slope: float) -> Gate:
    return Gate(lambda dy, x: _aten.leaky_relu_backward(dy, x, slope, False), 0, 0.0, math.nan, off=slope)


def _hardtanh(low: float = 0.0, high: float = 6.0) -> Gate:
    middle = low + (high - low) / 2 if math.isfinite(high - low) else min(max(0.0, 2 * low + 1), 2 * high - 1)
    return Gate(lambda dy, x: _aten.hardtanh_backward(dy, x, low, high), 1, low, high, open_at=middle)


def _hardsigmoid() -> Gate:
    return Gate(_aten.hardsigmoid_backward, 0, -3.0, 3.0, on=1 / 6, open_at=0.0)


def _hardshrink(size: float) -> Gate:
    return Gate(lambda dy, x: _aten.hardshrink_backward(dy, x, size), 2, -size, size, closed_at=0.0)


def _softshrink(size: float) -> Gate:
    return Gate(lambda dy, x: _aten.softshrink_backward(dy, x, size), 2, -size, size, closed_at=0.0)


_GATES: dict[str, Callable[..., Gate]] = {
    "relu": _threshold,
    "leaky_relu": _leaky_relu,
    "hardtanh": _hardtanh,
    "relu6": _hardtanh,
    "hardsigmoid": _hardsigmoid,
    "hardshrink": _hardshrink,
    "softshrink": _softshrink,
    "threshold": _threshold,
}
_NAMES = tuple(name for name in POINTWISE if name != "identity")
CURVES = tuple(name for name in _NAMES if name not in _GATES)
GATES = tuple(_GATES)
