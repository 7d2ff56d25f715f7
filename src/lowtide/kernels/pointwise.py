"""Torch's pointwise activations, in one table: the module, its numbers, the op, and the op in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_Op = Callable[..., Tensor]


class Pointwise(NamedTuple):
    """An activation without parameters, as torch has it."""

    module: type[nn.Module]
    function: _Op  # of the input and the numbers
    in_place: _Op | None = None  # None where torch has none
    numbers: Mapping[str, float] = MappingProxyType({})  # attributes of the module, with torch's defaults

    @property
    def defaults(self) -> tuple[float, ...]:
        """The numbers of a module made without arguments."""
        return tuple(self.numbers.values())


def read(module: object, kind: type | None = None) -> tuple[str, tuple[float, ...]] | None:
    """Name and numbers of a module of exactly a type of the table, or of ``kind`` instead; None for any other.

    >>> read(nn.Softplus(beta=2)), read(nn.GELU("tanh")), read(nn.PReLU())
    (('softplus', (2.0, 20.0)), ('gelu', (1.0,)), None)
    """
    name = _NAMES.get(kind or type(module))
    if name is None:
        return None
    values = (getattr(module, attribute) for attribute in POINTWISE[name].numbers)
    return name, tuple(float(value == "tanh" if isinstance(value, str) else value) for value in values)


def _gelu(x: Tensor, tanh: float = 0.0) -> Tensor:
    return F.gelu(x, approximate="tanh" if tanh else "none")


POINTWISE: dict[str, Pointwise] = {
    "identity": Pointwise(nn.Identity, lambda x: x, lambda x: x),
    "gelu": Pointwise(nn.GELU, _gelu, numbers={"approximate": 0.0}),  # 1 for the approximation by tanh
    "silu": Pointwise(nn.SiLU, F.silu, lambda x: F.silu(x, inplace=True)),
    "mish": Pointwise(nn.Mish, F.mish, lambda x: F.mish(x, inplace=True)),
    "elu": Pointwise(nn.ELU, F.elu, F.elu_, {"alpha": 1.0}),
    "selu": Pointwise(nn.SELU, F.selu, F.selu_),
    "celu": Pointwise(nn.CELU, F.celu, F.celu_, {"alpha": 1.0}),
    "softplus": Pointwise(nn.Softplus, F.softplus, numbers={"beta": 1.0, "threshold": 20.0}),
    "tanh": Pointwise(nn.Tanh, torch.tanh, torch.tanh_),
    "sigmoid": Pointwise(nn.Sigmoid, torch.sigmoid, torch.sigmoid_),
    "logsigmoid": Pointwise(nn.LogSigmoid, F.logsigmoid),
    "hardswish": Pointwise(nn.Hardswish, F.hardswish, lambda x: F.hardswish(x, inplace=True)),
    "softsign": Pointwise(nn.Softsign, F.softsign),
    "tanhshrink": Pointwise(nn.Tanhshrink, F.tanhshrink),
    "relu": Pointwise(nn.ReLU, F.relu, F.relu_),
    "leaky_relu": Pointwise(nn.LeakyReLU, F.leaky_relu, F.leaky_relu_, {"negative_slope": 0.01}),
    "hardtanh": Pointwise(nn.Hardtanh, F.hardtanh, F.hardtanh_, {"min_val": -1.0, "max_val": 1.0}),
    "relu6": Pointwise(nn.ReLU6, F.relu6, lambda x: F.relu6(x, inplace=True)),
    "hardsigmoid": Pointwise(nn.Hardsigmoid, F.hardsigmoid, lambda x: F.hardsigmoid(x, inplace=True)),
    "hardshrink": Pointwise(nn.Hardshrink, F.hardshrink, numbers={"lambd": 0.5}),
    "softshrink": Pointwise(nn.Softshrink, F.softshrink, numbers={"lambd": 0.5}),
    "threshold": Pointwise(
        nn.Threshold,
        F.threshold,
        lambda x, *numbers: F.threshold(x, *numbers, inplace=True),
        {"threshold": 0.0, "value": 0.0},
    ),
}

_NAMES: dict[type, str] = {activation.module: name for name, activation in POINTWISE.items()}
