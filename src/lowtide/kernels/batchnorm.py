"""Batch norm + activation by the kernels that fit the tensor: Triton's on a GPU, ATen's elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lowtide.kernels.activations import Activation
from lowtide.kernels.reference import batchnorm as reference
from lowtide.kernels.reference.batchnorm import Affine, Keeps, Running, Sums


def statistics(x: Tensor, running: Running | None = None) -> tuple[Tensor, Tensor]:
    """The mean and the biased variance of each channel; the running statistics follow them."""
    return reference.statistics(x, running)


def normalize(
    kept: Tensor,
    keeps: Keeps,
    affine: Affine,
    activation: Activation,
    learned: Sequence[Tensor] = (),
    residual: Tensor | None = None,
) -> Tensor:
    """Z from x or x̂."""
    if activation.name == "module":
        assert activation.module is not None
        with torch.no_grad():
            return activation.module(reference.preactivation(kept, keeps, affine, residual))
    return reference.normalize(kept, keeps, affine, activation, learned[0] if learned else None, residual)


def backward(
    dz: Tensor,
    kept: Tensor,
    keeps: Keeps,
    affine: Affine,
    activation: Activation,
    learned: Sequence[Tensor] = (),
    residual: Tensor | None = None,
    *,
    training: bool,
    sums: Sums | None = None,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor | None], Tensor]:
    """dx, dγ, dβ, the gradients of what the activation learns, and dy: that of the residual."""
    dtype = dz.dtype
    if keeps == "z":
        y = activation.inverse(kept)
        dz = dz.to(y.dtype)  # 16 bits: rounding y once more would cost what the rounding of z did
        kept = y
    else:
        y = reference.preactivation(kept, keeps, affine, residual)
    dy, dlearned = _activation_backward(dz, y, activation, learned)
    dx, dweight, dbias = reference.input_backward(dy, kept, keeps, affine, training=training, sums=sums)
    return dx.to(dtype), dweight, dbias, dlearned, dy


def _activation_backward(
    dz: Tensor, y: Tensor, activation: Activation, learned: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor | None]]:
    if activation.name != "module":
        dy, dslopes = activation.backward(dz, y, learned[0] if learned else None)
        return dy, [dslopes] if learned else []
    module: Any = activation.module
    inputs = [y.requires_grad_(), *(p for p in learned if p.requires_grad)]
    with torch.enable_grad():
        z = module(y)
    dy, *found = torch.autograd.grad(z, inputs, dz, allow_unused=True)
    rest = iter(found)
    return dy, [next(rest) if p.requires_grad else None for p in learned]
