"""Pointwise activations, one row each: torch's ops, derivative and inverse, and what few-bit codes need to know.

Batch norm fuses the activations that have a ``code``, the number by which kernels in Triton know them. Few-bit backward
serves all of them. A *gate* is straight on both sides of its bends, so one bit gives torch's own gradient. The
derivative of any other activation is approximated by a few levels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide.compat.operators import schema_of
from lowtide.errors import LowtideError

_aten: Any = torch.ops.aten
_Op = Callable[..., Tensor]


@dataclass(frozen=True)
class Activation:
    """An activation z = φ(y) with its numbers, such as a slope.

    ``function`` is set where lowtide has no formula, or where the activation learns (PReLU): it is called as it is.

    >>> Activation.of("leaky_relu"), Activation.of(nn.ELU(alpha=0.5)).invertible, Activation.of(nn.ReLU()).is_gate
    (leaky_relu(0.01), True, True)
    """

    name: str
    numbers: tuple[float, ...] = ()
    function: Callable[[Tensor], Tensor] | None = None

    @classmethod
    def of(cls, activation: str | nn.Module | Activation | None) -> Activation:
        """Read the activation behind a batch norm: a name, a module of ``torch.nn``, or any other pointwise module."""
        if isinstance(activation, Activation):
            return activation
        if activation is None or type(activation) is nn.Identity:
            return cls("identity")
        if isinstance(activation, str):
            if activation == "prelu":
                return cls(activation, (), nn.PReLU())
            if activation not in FUSED:
                raise LowtideError(f"Unknown activation {activation!r}", hint=f"Known: {_KNOWN}.")
            return cls(activation, POINTWISE[activation].defaults)
        if not isinstance(activation, nn.Module):
            raise LowtideError(f"{activation!r} is not an activation", hint=f"Give a module, or one of {_KNOWN}.")
        if type(activation) is nn.PReLU:
            return cls("prelu", (), activation)
        known = read_module(activation)
        return known if known is not None and known.name in FUSED else cls("module", (), activation)

    @classmethod
    def pointwise(cls, activation: object) -> Activation:
        """Read a name, a module of ``torch.nn``, a function of ``torch.nn.functional``, or any function of one number.

        An unknown function must act on each element alone; autograd finds its derivative.
        """
        if isinstance(activation, Activation):
            return activation
        if isinstance(activation, str):
            if activation not in FEW_BIT:
                raise LowtideError(f"Unknown activation {activation!r}", hint=f"Known: {', '.join(FEW_BIT)}.")
            return cls(activation, POINTWISE[activation].defaults)
        known = read_module(activation)
        if known is not None:
            return known
        if isinstance(activation, nn.Module) and next(activation.parameters(), None) is not None:
            raise LowtideError(
                f"{type(activation).__name__} learns, and the gradient of its parameters needs the whole input",
                hint="Few-bit backward is for activations without parameters.",
            )
        if not callable(activation) or isinstance(activation, type):
            raise LowtideError(f"{activation!r} is not an activation", hint="Give a module, a name or a function.")
        for name in FEW_BIT:
            if activation in (POINTWISE[name].function, getattr(F, name, None), getattr(torch, name, None)):
                return cls(name, POINTWISE[name].defaults)
        shown = getattr(activation, "__name__", type(activation).__name__)
        return _checked(cls(shown, (), cast(Callable[[Tensor], Tensor], activation)))

    @classmethod
    def of_op(cls, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, gradient: bool) -> Activation | None:
        """Read a call of an ATen op that is an activation, or the ``gradient`` of one; None for any other.

        >>> Activation.of_op(_aten.leaky_relu_backward.default, (None, None, 0.1, False), {}, gradient=True)
        leaky_relu(0.1)
        """
        tensors = 2 if gradient else 1
        for name, row in POINTWISE.items():
            if op is (row.gradient if gradient else row.op):
                settings = {each.name: each.default_value for each in schema_of(op).arguments[tensors:]}
                given = {**settings, **kwargs, **dict(zip(settings, args[tensors:], strict=False))}
                numbers = _numbers(given.values())[: len(row.numbers)]
                others = list(settings)[len(numbers) :]  # such as elu's scale
                if all(given[each] == (settings[each] or 0) for each in others):
                    return cls(name, numbers + row.defaults[len(numbers) :])
        return None

    def __call__(self, y: Tensor) -> Tensor:
        """Compute z by torch's own op."""
        return self._row.function(y, *self.numbers) if self.function is None else self.function(y)

    def write(self, y: Tensor, slopes: Tensor | None = None) -> Tensor:
        """Compute z, over y where torch has an op for it."""
        if slopes is not None:
            return _aten._prelu_kernel(y, _per_channel(slopes, y))
        if self.function is not None:
            return self.function(y)
        return (self._row.in_place or self._row.function)(y, *self.numbers)

    def backward(
        self, dz: Tensor, y: Tensor, slopes: Tensor | None = None, *, write: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Return dL/dy, and dL/dslopes of a PReLU. ``write``: over y, where torch can."""
        if slopes is not None:
            dy, full = _aten._prelu_kernel_backward(dz, y, _per_channel(slopes, y))
            return dy, full.sum_to_size(_per_channel(slopes, y).shape).view(slopes.shape).to(slopes.dtype)
        assert self._row.backward is not None
        over = write and self._row.writes_gradient and dz.dtype == y.dtype and dz.stride() == y.stride()
        return self._row.backward(dz, y, *self.numbers, **({"grad_input": y} if over else {})), None

    def inverse(self, z: Tensor) -> Tensor:
        """Return y, in float32 at least; for a saturated z, the last y that differs from the end."""
        wide = z.float() if z.dtype in (torch.float16, torch.bfloat16) else z
        limits = torch.finfo(z.dtype)
        least = max(limits.tiny * limits.eps, torch.finfo(wide.dtype).tiny)  # the smallest z > 0
        assert self._row.inverse is not None
        return self._row.inverse(wide, _Ends(limits.eps / 2, least), *self.numbers)

    def slope(self, x: Tensor) -> Tensor:
        """Return φ'(x), by torch's own derivative."""
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(self(x).sum(), x)[0]

    @property
    def invertible(self) -> bool:
        """Tell whether z determines y. ReLU and others that fold do not; a PReLU may learn to fold."""
        return self.function is None and self._row.inverse is not None and all(number > 0 for number in self.numbers)

    @property
    def slope_from_sign(self) -> bool:
        """Tell whether φ' depends on the sign of z alone."""
        return self.name == "relu" or (self.name == "leaky_relu" and self.numbers[0] > 0)

    @property
    def may_overwrite(self) -> bool:
        """Tell whether torch's backward needs z alone, so that z may take the place of y."""
        return self.function is None and self._row.from_result and all(number > 0 for number in self.numbers)

    @property
    def bends(self) -> tuple[float, ...]:
        """The points where φ' jumps or bends."""
        return () if self.function is not None else self._row.bends(*self.numbers)

    @property
    def is_gate(self) -> bool:
        """Tell whether one bit of each element gives φ' exactly."""
        return self.function is None and self._row.gate is not None

    @property
    def gate(self) -> Gate:
        """The slopes of a gate, and where each holds."""
        assert self._row.gate is not None
        return self._row.gate(*self.numbers)

    @property
    def module(self) -> nn.Module | None:
        """The module to call, for an activation without a formula."""
        return self.function if isinstance(self.function, nn.Module) else None

    @property
    def _row(self) -> Pointwise:
        return POINTWISE[self.name]

    def __repr__(self) -> str:
        if self.name == "gelu":
            return "gelu(tanh)" if self.numbers[0] else "gelu"
        numbers = ", ".join(f"{number:g}" for number in self.numbers)
        shown = type(self.function).__name__ if self.name == "module" else self.name
        return f"{shown}({numbers})" if numbers else shown


def read_module(module: object, kind: type | None = None) -> Activation | None:
    """Read a module of exactly a type of ``torch.nn``, or of ``kind`` instead; None for any other, and for identity.

    >>> read_module(nn.Softplus(beta=2)), read_module(nn.GELU("tanh")), read_module(nn.PReLU())
    (softplus(2, 20), gelu(tanh), None)
    """
    name = _BY_MODULE.get(kind or type(module))
    if name is None:
        return None
    values = (getattr(module, attribute) for attribute in POINTWISE[name].numbers)
    return Activation(name, _numbers(values))


def _numbers(values: Iterable[Any]) -> tuple[float, ...]:
    return tuple(float(value == "tanh" if isinstance(value, str) else value) for value in values)


def is_in_place(module: nn.Module) -> bool:
    """Tell whether a module writes its result over its input."""
    return bool(getattr(module, "inplace", False))


def _checked(activation: Activation) -> Activation:
    """Refuse a function that some numbers show not to act on each element alone, or not to be finite."""
    x = torch.linspace(-2.0, 2.0, 9, dtype=torch.float64).view(3, 3)
    try:
        with torch.no_grad():
            together, alone = activation(x.clone()), [activation(value.clone()) for value in x.view(9, 1, 1)]
        same = together.shape == x.shape and torch.allclose(together.view(9), torch.cat(alone).view(9), equal_nan=True)
    except (RuntimeError, ValueError, IndexError, TypeError):  # it wants certain shapes, or more arguments
        same = False
    if not same:
        raise LowtideError(
            f"{activation} does not act on each element alone, so a slope for each is not its derivative",
            hint="Few-bit backward is for functions of one number, the same one in every call.",
        )
    x = torch.tensor([-2.0, -0.1, 0.1, 2.0])
    if not torch.isfinite(activation(x) * activation.slope(x)).all():
        raise LowtideError(f"{activation} is not finite for all inputs", hint="Activations are: nn.GELU, nn.SiLU, …")
    return activation


def _per_channel(slopes: Tensor, y: Tensor) -> Tensor:
    return slopes.view(1, -1, *[1] * (y.dim() - 2)).to(y.dtype)


class Gate(NamedTuple):
    """The slope ``on`` where a gate is open, else ``off``.

    Kind 0 is open between low and high, kind 1 there and at NaN, kind 2 outside and at NaN. A bound of NaN is no bound.
    """

    kind: int
    low: float
    high: float
    on: float = 1.0
    off: float = 0.0
    open_at: float = math.inf  # some x where it is open, and one where it is closed
    closed_at: float = -math.inf


def _clamped(low: float = 0.0, high: float = 6.0) -> Gate:
    middle = low + (high - low) / 2 if math.isfinite(high - low) else min(max(0.0, 2 * low + 1), 2 * high - 1)
    return Gate(1, low, high, open_at=middle)


def _shrunk(size: float) -> Gate:
    return Gate(2, -size, size, closed_at=0.0)


class _Ends(NamedTuple):
    """Values of z nearest to the ends of φ's range: 1 less a unit roundoff, and the least number above 0."""

    unit: float
    least: float


def _elu_inverse(z: Tensor, ends: _Ends, alpha: float) -> Tensor:
    return torch.where(torch.signbit(z), torch.log1p((z / alpha).clamp(min=ends.unit - 1)), z)


def _softplus_inverse(z: Tensor, ends: _Ends, beta: float, threshold: float) -> Tensor:
    scaled = beta * z.clamp(min=ends.least)
    return torch.where(scaled > threshold, z, torch.log(torch.expm1(scaled)) / beta)


def _gelu(x: Tensor, tanh: float = 0.0) -> Tensor:
    return F.gelu(x, approximate="tanh" if tanh else "none")


def _at_zero(*numbers: float) -> tuple[float, ...]:
    return (0.0,)


class Pointwise(NamedTuple):
    """An activation without parameters, as torch has it. Functions take tensors first, then the numbers."""

    module: type[nn.Module]
    function: _Op
    in_place: _Op | None = None
    numbers: Mapping[str, float] = MappingProxyType({})  # attributes of the module, with torch's defaults
    code: int | None = None  # in Triton's kernels
    backward: _Op | None = None  # of dz and y
    writes_gradient: bool = False  # backward takes ``grad_input``
    from_result: bool = False  # torch's own backward needs z alone
    inverse: _Op | None = None
    bends: Callable[..., tuple[float, ...]] = lambda *numbers: ()
    gate: Callable[..., Gate] | None = None
    op: Any = None  # of ATen, as graphs call it: the input, then the numbers
    gradient: Any = None  # of ATen, where captured graphs have one that reads dz, the input y, then the numbers

    @property
    def defaults(self) -> tuple[float, ...]:
        """The numbers of a module made without arguments."""
        return tuple(self.numbers.values())


POINTWISE: dict[str, Pointwise] = {
    "identity": Pointwise(
        nn.Identity, lambda x: x, lambda x: x, code=0, from_result=True,
        backward=lambda dz, y: dz, inverse=lambda z, ends: z,
    ),
    "gelu": Pointwise(
        nn.GELU, _gelu, numbers={"approximate": 0.0}, code=6, writes_gradient=True,  # 1 for the approximation by tanh
        backward=lambda dz, y, tanh, **out: _aten.gelu_backward(dz, y, approximate="tanh" if tanh else "none", **out),
        op=_aten.gelu.default, gradient=_aten.gelu_backward.default,
    ),
    "silu": Pointwise(
        nn.SiLU, F.silu, lambda x: F.silu(x, inplace=True), code=5, writes_gradient=True,
        backward=lambda dz, y, **out: _aten.silu_backward(dz, y, **out),
        op=_aten.silu.default, gradient=_aten.silu_backward.default,
    ),
    "mish": Pointwise(
        nn.Mish, F.mish, lambda x: F.mish(x, inplace=True), op=_aten.mish.default, gradient=_aten.mish_backward.default,
    ),
    "elu": Pointwise(
        nn.ELU, F.elu, F.elu_, {"alpha": 1.0}, code=3, from_result=True, writes_gradient=True,
        backward=lambda dz, y, alpha, **out: _aten.elu_backward(dz, alpha, 1, 1, False, y, **out),
        inverse=_elu_inverse, bends=_at_zero, op=_aten.elu.default,
    ),
    "selu": Pointwise(nn.SELU, F.selu, F.selu_, bends=_at_zero),
    "celu": Pointwise(
        nn.CELU, F.celu, F.celu_, {"alpha": 1.0}, code=4, from_result=True,
        backward=lambda dz, y, alpha: _aten.elu_backward(dz, alpha, 1, 1 / alpha, False, y),
        inverse=lambda z, ends, alpha: alpha * _elu_inverse(z / alpha, ends, 1.0), bends=_at_zero,
        op=_aten.celu.default,
    ),
    "softplus": Pointwise(
        nn.Softplus, F.softplus, numbers={"beta": 1.0, "threshold": 20.0}, code=11, writes_gradient=True,
        backward=lambda dz, y, beta, threshold, **out: _aten.softplus_backward(dz, y, beta, threshold, **out),
        inverse=_softplus_inverse, bends=lambda beta, threshold: (threshold / beta,),
        op=_aten.softplus.default, gradient=_aten.softplus_backward.default,
    ),
    "tanh": Pointwise(
        nn.Tanh, torch.tanh, torch.tanh_, code=9, from_result=True,
        backward=lambda dz, y: _aten.tanh_backward(dz, torch.tanh(y)),
        inverse=lambda z, ends: torch.atanh(z.clamp(ends.unit - 1, 1 - ends.unit)), op=_aten.tanh.default,
    ),
    "sigmoid": Pointwise(
        nn.Sigmoid, torch.sigmoid, torch.sigmoid_, code=10, from_result=True,
        backward=lambda dz, y: _aten.sigmoid_backward(dz, torch.sigmoid(y)),
        inverse=lambda z, ends: torch.logit(z.clamp(ends.least, 1 - ends.unit)), op=_aten.sigmoid.default,
    ),
    "logsigmoid": Pointwise(nn.LogSigmoid, F.logsigmoid, op=_aten.log_sigmoid_forward.default),
    "hardswish": Pointwise(
        nn.Hardswish, F.hardswish, lambda x: F.hardswish(x, inplace=True), code=8,
        backward=lambda dz, y: _aten.hardswish_backward(dz, y), bends=lambda: (-3.0, 3.0),
        op=_aten.hardswish.default, gradient=_aten.hardswish_backward.default,
    ),
    "softsign": Pointwise(nn.Softsign, F.softsign, bends=_at_zero),
    "tanhshrink": Pointwise(nn.Tanhshrink, F.tanhshrink),
    "relu": Pointwise(
        nn.ReLU, F.relu, F.relu_, code=1, from_result=True, writes_gradient=True,
        backward=lambda dz, y, **out: _aten.threshold_backward(dz, y, 0, **out),
        gate=lambda: Gate(1, 0.0, math.nan), op=_aten.relu.default, gradient=_aten.threshold_backward.default,  # at 0
    ),
    "leaky_relu": Pointwise(
        nn.LeakyReLU, F.leaky_relu, F.leaky_relu_, {"negative_slope": 0.01},
        code=2, from_result=True, writes_gradient=True,
        backward=lambda dz, y, slope, **out: _aten.leaky_relu_backward(dz, y, slope, False, **out),
        inverse=lambda z, ends, slope: F.leaky_relu(z, 1 / slope), gate=lambda slope: Gate(0, 0.0, math.nan, off=slope),
        op=_aten.leaky_relu.default, gradient=_aten.leaky_relu_backward.default,
    ),
    "hardtanh": Pointwise(
        nn.Hardtanh, F.hardtanh, F.hardtanh_, {"min_val": -1.0, "max_val": 1.0},
        backward=lambda dz, y, low, high: _aten.hardtanh_backward(dz, y, low, high), gate=_clamped,
        op=_aten.hardtanh.default, gradient=_aten.hardtanh_backward.default,
    ),
    "relu6": Pointwise(
        nn.ReLU6, F.relu6, lambda x: F.relu6(x, inplace=True),
        backward=lambda dz, y: _aten.hardtanh_backward(dz, y, 0.0, 6.0), gate=_clamped,
    ),
    "hardsigmoid": Pointwise(
        nn.Hardsigmoid, F.hardsigmoid, lambda x: F.hardsigmoid(x, inplace=True),
        backward=_aten.hardsigmoid_backward, gate=lambda: Gate(0, -3.0, 3.0, on=1 / 6, open_at=0.0),
        op=_aten.hardsigmoid.default, gradient=_aten.hardsigmoid_backward.default,
    ),
    "hardshrink": Pointwise(
        nn.Hardshrink, F.hardshrink, numbers={"lambd": 0.5},
        backward=lambda dz, y, size: _aten.hardshrink_backward(dz, y, size), gate=_shrunk,
        op=_aten.hardshrink.default,
    ),
    "softshrink": Pointwise(
        nn.Softshrink, F.softshrink, numbers={"lambd": 0.5},
        backward=lambda dz, y, size: _aten.softshrink_backward(dz, y, size), gate=_shrunk,
        op=_aten.softshrink.default,
    ),
    "threshold": Pointwise(
        nn.Threshold, F.threshold, lambda x, *numbers: F.threshold(x, *numbers, inplace=True),
        {"threshold": 0.0, "value": 0.0},
        backward=lambda dz, y, threshold, value: _aten.threshold_backward(dz, y, threshold),
        gate=lambda threshold, value: Gate(1, threshold, math.nan),
        op=_aten.threshold.default, gradient=_aten.threshold_backward.default,
    ),
}  # fmt: skip

FUSED: dict[str, int] = {name: row.code for name, row in POINTWISE.items() if row.code is not None}
FEW_BIT = tuple(name for name in POINTWISE if name != "identity")
GATES = tuple(name for name, row in POINTWISE.items() if row.gate is not None)
CURVES = tuple(name for name in FEW_BIT if name not in GATES)
_KNOWN = ", ".join((*FUSED, "prelu"))
_BY_MODULE: dict[type, str] = {POINTWISE[name].module: name for name in FEW_BIT}
