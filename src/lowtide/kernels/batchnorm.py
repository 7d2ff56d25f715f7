"""Batch norm + activation by the kernels that fit the tensor: Triton's on a GPU, ATen's elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lowtide.kernels import launches
from lowtide.kernels.activations import Activation
from lowtide.kernels.reference import batchnorm as reference
from lowtide.kernels.reference.batchnorm import Affine, Keeps, Running, Sums


def forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running: Running,
    activation: Activation,
    learned: Sequence[Tensor] = (),
    residual: Tensor | None = None,
    *,
    eps: float,
    keep_xhat: bool = False,
) -> tuple[Tensor, Affine, Tensor | None]:
    """The output z, what made y of x, and x̂ if wanted. The running statistics follow those of the batch."""
    slopes = learned[0] if learned else None
    fast = _fast_kernels(x, activation, slopes, weight, bias, running.mean, running.var)
    if fast is not None:
        z, mean, invstd, xhat = fast.forward(
            x, weight, bias, running, activation, slopes, residual, eps=eps, keep_xhat=keep_xhat
        )
        return z, Affine(mean, invstd, weight, bias), xhat
    affine = Affine(*moments(x, running, eps=eps), weight, bias)
    if not keep_xhat:
        return normalize(x, "x", affine, activation, learned, residual), affine, None
    xhat = normalize(x, "x", Affine(affine.mean, affine.invstd), Activation("identity"))
    return normalize(xhat, "xhat", affine, activation, learned, residual), affine, xhat


def statistics(x: Tensor, running: Running | None = None) -> tuple[Tensor, Tensor]:
    """The mean and the biased variance of each channel; the running statistics follow them."""
    running = running or Running()
    fast = _fast_kernels(x, None, None, running.mean, running.var)
    if fast is None:
        return reference.statistics(x, running)
    mean, inverse = fast.measure(x, running, eps=0.0)
    return mean, inverse.reciprocal().square()


def moments(x: Tensor, running: Running, *, eps: float) -> tuple[Tensor, Tensor]:
    """The mean and 1/σ of each channel; the running statistics follow those of the batch."""
    fast = _fast_kernels(x, None, None, running.mean, running.var)
    if fast is not None:
        return fast.measure(x, running, eps=eps)
    mean, var = reference.statistics(x, running)
    return mean, inverse_deviation(var, eps)


def inverse_deviation(var: Tensor, eps: float) -> Tensor:
    """1/σ. In float32 the rounding of its steps would show in every z."""
    return torch.rsqrt(var.double() + eps).to(var.dtype)


def normalize(
    saved: Tensor,
    keeps: Keeps,
    affine: Affine,
    activation: Activation,
    learned: Sequence[Tensor] = (),
    residual: Tensor | None = None,
) -> Tensor:
    """φ(y), y from x or x̂."""
    slopes = learned[0] if learned else None
    fast = _fast_kernels(saved, activation, slopes, affine.weight, affine.bias)
    if fast is not None:
        return fast.normalize(saved, keeps, affine, activation, slopes, residual)[0]
    if activation.name == "module":
        assert activation.module is not None
        with torch.no_grad():
            return activation.module(reference.preactivation(saved, keeps, affine, residual))
    return reference.normalize(saved, keeps, affine, activation, slopes, residual)


def backward(
    dz: Tensor,
    saved: Tensor,
    keeps: Keeps,
    affine: Affine,
    activation: Activation,
    learned: Sequence[Tensor] = (),
    residual: Tensor | None = None,
    *,
    training: bool,
    joined: Tensor | None = None,
    sums: Sums | None = None,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor | None], Tensor]:
    """dx, dγ, dβ, the gradients of what the activation learns, and dy: that of the residual.

    ``joined`` is the z of a join whose residual was not saved, where the sign of z is all that φ' depends on.
    """
    slopes = learned[0] if learned else None
    fast = _fast_kernels(saved, activation, slopes, affine.weight, affine.bias)
    if fast is not None:
        dx, dweight, dbias, dslopes, dy = fast.backward(
            dz, saved, keeps, affine, activation, slopes, residual, training=training, joined=joined, sums=sums
        )
        return dx, dweight, dbias, [dslopes] if learned else [], dy
    dtype = dz.dtype
    if keeps == "z":
        saved = activation.inverse(saved)
        dz = dz.to(saved.dtype)  # 16 bits: rounding y once more would cost what the rounding of z did
    if keeps != "z" and joined is None and not learned and activation.name != "module":
        dy, dlearned = reference.activation_backward(dz, saved, keeps, affine, activation, residual), []
    else:
        y = saved if keeps == "z" else joined
        y = reference.preactivation(saved, keeps, affine, residual) if y is None else y
        dy, dlearned = _activation_backward(dz, y, activation, learned)
    dx, dweight, dbias = reference.input_backward(dy, saved, keeps, affine, training=training, sums=sums)
    return dx.to(dtype), dweight, dbias, dlearned, dy


def _fast_kernels(x: Tensor, activation: Activation | None, slopes: Tensor | None, *vectors: Tensor | None) -> Any:
    """The kernels in Triton, where they can run. They take bare addresses: what does not fit is ATen's to judge."""
    if not x.numel() or (activation is not None and activation.name == "module"):
        return None
    channels, device = x.shape[1], x.device
    for vector in (slopes, *vectors):
        if vector is not None:
            fits = vector.numel() == channels or (vector is slopes and vector.numel() == 1)
            if not fits or not vector.is_contiguous() or vector.device != device:
                return None
    return launches.fast_kernels("batchnorm", x)


def _activation_backward(
    dz: Tensor, y: Tensor, activation: Activation, learned: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor | None]]:
    if activation.name != "module":
        dy, dslopes = activation.backward(dz, y, learned[0] if learned else None)
        return dy, [dslopes] if learned else []
    module: Any = activation.module
    inputs = [y.requires_grad_(), *(p for p in learned if p.requires_grad)]
    with torch.enable_grad():
        z = module(y.clone() if getattr(module, "inplace", False) else y)
    dy, *gradients = torch.autograd.grad(z, inputs, dz, allow_unused=True)
    rest = iter(gradients)
    return dy, [next(rest) if p.requires_grad else None for p in learned]
