"""Batch norm + activation in plain torch.

x̂ = (x - μ)/σ, y = γx̂ + β (+ residual), z = φ(y). With dy = dz·φ'(y) and m values per channel:

    dβ = Σ dy      dγ = Σ dy·x̂      dx = (γ/σ)(dy - dβ/m - x̂·dγ/m)

A layer keeps x, x̂ or z for backward. ATen's batch-norm kernels serve all three, since x̂ is a batch with mean 0 and
σ = 1, and y one with mean β and σ = γ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lowtide.kernels.activations import Activation

Keeps = Literal["x", "xhat", "z"]
Sums = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # local Σ dy and Σ dy·x̂ -> their means over all processes

_aten: Any = torch.ops.aten


@dataclass(frozen=True)
class Running:
    """The running statistics to update, and by how much."""

    mean: Tensor | None = None
    var: Tensor | None = None
    momentum: float = 0.1


@dataclass(frozen=True)
class Affine:
    """What turns x into y: per channel the mean, 1/σ, γ and β. Mean and 1/σ are float32 at least."""

    mean: Tensor
    invstd: Tensor
    weight: Tensor | None = None
    bias: Tensor | None = None

    @property
    def gamma(self) -> Tensor:
        return torch.ones_like(self.invstd) if self.weight is None else self.weight.to(self.invstd.dtype)

    @property
    def beta(self) -> Tensor:
        return torch.zeros_like(self.invstd) if self.bias is None else self.bias.to(self.invstd.dtype)

    def of_kept(self, keeps: Keeps) -> Affine:
        """What turns the kept tensor into y."""
        if keeps == "x":
            return self
        return Affine(torch.zeros_like(self.mean), torch.ones_like(self.invstd), self.weight, self.bias)


def statistics(x: Tensor, running: Running | None = None) -> tuple[Tensor, Tensor]:
    """The mean and the biased variance of each channel; the running statistics follow them."""
    held = running or Running()
    mean, var = _aten.batch_norm_update_stats(x, held.mean, held.var, held.momentum)
    wide = torch.promote_types(x.dtype, torch.float32)
    return mean.to(wide), var.to(wide)


def normalize(
    kept: Tensor,
    keeps: Keeps,
    affine: Affine,
    activation: Activation,
    slopes: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Z from x or x̂. The same call gives the same bits, so forward and rebuilding agree."""
    return activation.write(preactivation(kept, keeps, affine, residual), slopes)


def preactivation(kept: Tensor, keeps: Keeps, affine: Affine, residual: Tensor | None = None) -> Tensor:
    """Y from x or x̂, by ATen's inference kernel: on a CPU there is none faster."""
    a = affine.of_kept(keeps)
    weight, bias = (None if t is None else t.to(a.mean.dtype) for t in (a.weight, a.bias))
    y = _aten.native_batch_norm(kept, weight, bias, a.mean, a.invstd.square().reciprocal(), False, 0.0, 0.0)[0]
    return y if residual is None else y.add_(residual)


def input_backward(
    dy: Tensor, kept: Tensor, keeps: Keeps, affine: Affine, *, training: bool, sums: Sums | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dγ and dβ from dy and the kept x, x̂ or y (keeps "z")."""
    source, mean, invstd, weight = _as_batch(kept, keeps, affine)
    if sums is not None:
        return _summed_backward(dy, source, mean, invstd, weight, sums)
    running = (None, None) if training else (mean, invstd.square().reciprocal())
    return _aten.native_batch_norm_backward(dy, source, weight, *running, mean, invstd, training, 0.0, [True] * 3)


def _as_batch(kept: Tensor, keeps: Keeps, affine: Affine) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The kept tensor as the input of a batch norm that has the same x̂ and the same γ/σ."""
    if keeps == "x":
        return kept, affine.mean, affine.invstd, affine.gamma
    if keeps == "xhat":
        return kept, torch.zeros_like(affine.mean), torch.ones_like(affine.invstd), affine.gamma * affine.invstd
    return kept, affine.beta, 1 / affine.gamma, affine.gamma.square() * affine.invstd


def _summed_backward(
    dy: Tensor, source: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor, sums: Sums
) -> tuple[Tensor, Tensor, Tensor]:
    axes = [axis for axis in range(dy.dim()) if axis != 1]
    shape = [-1 if axis == 1 else 1 for axis in range(dy.dim())]
    wide = dy.to(mean.dtype)
    xhat = (source.to(mean.dtype) - mean.view(shape)) * invstd.view(shape)
    dbias, dweight = wide.sum(axes), (wide * xhat).sum(axes)
    mean_dy, mean_dy_xhat = sums(dbias, dweight)
    dx = (weight * invstd).view(shape) * (wide - mean_dy.view(shape) - xhat * mean_dy_xhat.view(shape))
    return dx.to(dy.dtype), dweight, dbias
