"""Batch norm in training as ops of graphs: the statistics, and an elementwise rest that is cheap to recompute.

With μ and 1/σ of a channel, z = φ(γ(x - μ)/σ + β + residual). A step keeps x and two numbers for each channel, and
computes z wherever it reads it. The running statistics are results: a recomputed op changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lowtide.kernels import batchnorm
from lowtide.kernels.activations import Activation
from lowtide.kernels.batchnorm import Affine, Running


@torch.library.custom_op("lowtide::batchnorm_statistics", mutates_args=())
def batchnorm_statistics(
    x: Tensor, running_mean: Tensor | None, running_var: Tensor | None, momentum: float, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return μ and 1/σ of each channel, and the running mean and variance that follow them.

    Without running statistics the last two are NaN. They take their bytes all the same.
    """
    running = Running()
    if running_mean is not None and running_var is not None:
        running = Running(running_mean.clone(), running_var.clone(), momentum)
    mean, invstd = batchnorm.moments(x, running, eps=eps)
    moved = [torch.full_like(mean, math.nan) if each is None else each for each in (running.mean, running.var)]
    return mean, invstd, *moved  # pyright: ignore[reportReturnType]


@batchnorm_statistics.register_fake
def _(x: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    wide = torch.promote_types(x.dtype, torch.float32)
    vectors = (x.new_empty(x.shape[1], dtype=wide) for _ in range(4))
    return tuple(vectors)  # pyright: ignore[reportReturnType]


@torch.library.custom_op("lowtide::batchnorm_activation", mutates_args=())
def batchnorm_activation(
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
    numbers: Sequence[float],
) -> Tensor:
    """Return φ of the normalised x, plus a residual of its shape if given. It is laid out as x, which is dense."""
    affine = Affine(mean, invstd, weight, bias)
    return batchnorm.normalize(x, "x", affine, Activation(activation, tuple(numbers)), (), residual)


@batchnorm_activation.register_fake
def _(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


def _decomposed_statistics(x: Tensor, running_mean: Tensor | None, *given: Any) -> tuple[Tensor, ...]:
    """The same as ops that a compiler fuses."""
    running_var, momentum, eps = given
    axes = [axis for axis in range(x.dim()) if axis != 1]
    count = x.numel() // x.shape[1]
    var, mean = torch.var_mean(x.to(torch.promote_types(x.dtype, torch.float32)), axes, correction=0)
    invstd = torch.rsqrt(var + eps)
    if running_mean is None or running_var is None:
        return mean, invstd, torch.full_like(mean, math.nan), torch.full_like(mean, math.nan)
    unbiased = var * (count / max(count - 1, 1))
    return mean, invstd, running_mean.lerp(mean, momentum), running_var.lerp(unbiased, momentum)


def _decomposed_activation(x: Tensor, mean: Tensor, invstd: Tensor, *given: Any) -> Tensor:
    """The same as ops that a compiler fuses."""
    weight, bias, residual, activation, numbers = given
    affine = Affine(mean, invstd, weight, bias)
    shape = [-1 if axis == 1 else 1 for axis in range(x.dim())]
    mean, scale, shift = (each.view(shape) for each in (mean, affine.gamma * invstd, affine.beta))
    y = ((x.to(mean.dtype) - mean) * scale + shift).to(x.dtype)
    y = y if residual is None else y + residual
    return Activation(activation, tuple(numbers))(y)


STATISTICS: Any = torch.ops.lowtide.batchnorm_statistics.default
ACTIVATION: Any = torch.ops.lowtide.batchnorm_activation.default
DECOMPOSITIONS: Mapping[Any, Callable[..., Any]] = {
    STATISTICS: _decomposed_statistics,
    ACTIVATION: _decomposed_activation,
}
