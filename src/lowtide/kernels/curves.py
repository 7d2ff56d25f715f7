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
            if activation not in _FUNCTIONS:
                raise LowtideError(f"Unknown activation {activation!r}", hint=f"Known: {', '.join(_FUNCTIONS)}.")
            return cls(activation, _DEFAULTS.get(activation, ()))
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
        for name, (function, _) in _FUNCTIONS.items():
            if activation in (function, getattr(F, name, None), getattr(torch, name, None)):
                return cls(name, _DEFAULTS.get(name, ()))
        curve = cls(getattr(activation, "__name__", type(activation).__name__), (), cast(_In, activation))
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
        return self.function(x) if self.function is not None else _FUNCTIONS[self.name][0](x, *self.numbers)

    def write(self, x: Tensor) -> Tensor:
        """Y over x, by torch's own op in place where it has one."""
        in_place = None if self.function is not None else _FUNCTIONS[self.name][1]
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
    read = _MODULES.get(kind or type(module))
    return None if read is None else Curve(read[0], tuple(float(number) for number in read[1](module)))


def is_in_place(module: nn.Module) -> bool:
    """Whether a module writes its result over its input."""
    return bool(getattr(module, "inplace", False))


def _gelu(x: Tensor, tanh: float = 0.0) -> Tensor:
    return F.gelu(x, approximate="tanh" if tanh else "none")


_In = Callable[..., Tensor]

# The op, and the one in place where torch has one.
_FUNCTIONS: dict[str, tuple[_In, _In | None]] = {
    "gelu": (_gelu, None),
    "silu": (F.silu, lambda x: F.silu(x, inplace=True)),
    "mish": (F.mish, lambda x: F.mish(x, inplace=True)),
    "elu": (F.elu, F.elu_),
    "selu": (F.selu, F.selu_),
    "celu": (F.celu, F.celu_),
    "softplus": (F.softplus, None),
    "tanh": (torch.tanh, torch.tanh_),
    "sigmoid": (torch.sigmoid, torch.sigmoid_),
    "logsigmoid": (F.logsigmoid, None),
    "hardswish": (F.hardswish, lambda x: F.hardswish(x, inplace=True)),
    "softsign": (F.softsign, None),
    "tanhshrink": (F.tanhshrink, None),
    "relu": (F.relu, F.relu_),
    "leaky_relu": (F.leaky_relu, F.leaky_relu_),
    "hardtanh": (F.hardtanh, F.hardtanh_),
    "relu6": (F.relu6, lambda x: F.relu6(x, inplace=True)),
    "hardsigmoid": (F.hardsigmoid, lambda x: F.hardsigmoid(x, inplace=True)),
    "hardshrink": (F.hardshrink, None),
    "softshrink": (F.softshrink, None),
    "threshold": (F.threshold, lambda x, *numbers: F.threshold(x, *numbers, inplace=True)),
}

_DEFAULTS: dict[str, tuple[float, ...]] = {
    "gelu": (0.0,),  # 1 for the approximation by tanh
    "elu": (1.0,),
    "celu": (1.0,),
    "softplus": (1.0, 20.0),
    "leaky_relu": (0.01,),
    "hardtanh": (-1.0, 1.0),
    "hardshrink": (0.5,),
    "softshrink": (0.5,),
    "threshold": (0.0, 0.0),
}

_MODULES: dict[type, tuple[str, Callable[[Any], tuple[float, ...]]]] = {
    nn.GELU: ("gelu", lambda m: (m.approximate == "tanh",)),
    nn.SiLU: ("silu", lambda m: ()),
    nn.Mish: ("mish", lambda m: ()),
    nn.ELU: ("elu", lambda m: (m.alpha,)),
    nn.SELU: ("selu", lambda m: ()),
    nn.CELU: ("celu", lambda m: (m.alpha,)),
    nn.Softplus: ("softplus", lambda m: (m.beta, m.threshold)),
    nn.Tanh: ("tanh", lambda m: ()),
    nn.Sigmoid: ("sigmoid", lambda m: ()),
    nn.LogSigmoid: ("logsigmoid", lambda m: ()),
    nn.Hardswish: ("hardswish", lambda m: ()),
    nn.Softsign: ("softsign", lambda m: ()),
    nn.Tanhshrink: ("tanhshrink", lambda m: ()),
    nn.ReLU: ("relu", lambda m: ()),
    nn.LeakyReLU: ("leaky_relu", lambda m: (m.negative_slope,)),
    nn.Hardtanh: ("hardtanh", lambda m: (m.min_val, m.max_val)),
    nn.ReLU6: ("relu6", lambda m: ()),
    nn.Hardsigmoid: ("hardsigmoid", lambda m: ()),
    nn.Hardshrink: ("hardshrink", lambda m: (m.lambd,)),
    nn.Softshrink: ("softshrink", lambda m: (m.lambd,)),
    nn.Threshold: ("threshold", lambda m: (m.threshold, m.value)),
}

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
CURVES = tuple(name for name in _FUNCTIONS if name not in _GATES)
GATES = tuple(_GATES)
