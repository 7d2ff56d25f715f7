"""Batch norm + activation in plain torch.

x̂ = (x - μ)/σ, y = γx̂ + β (+ residual), z = φ(y). With dy = dz·φ'(y) and m values per channel:

    dβ = Σ dy      dγ = Σ dy·x̂      dx = (γ/σ)(dy - dβ/m - x̂·dγ/m)

A layer keeps x, x̂ or z for backward. ATen's batch-norm kernels serve all three. x̂ is a batch with mean 0 and σ = 1, y
one with mean β and σ = γ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lowtide.compat.tensors import storage_id
from lowtide.kernels.activations import Activation

Keeps = Literal["x", "xhat", "z"]
Sums = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # local Σ dy and Σ dy·x̂ -> their means over all processes

_aten: Any = torch.ops.aten
_PIECE_BYTES, _MOST_PIECES = 2**20, 8


class Running(NamedTuple):
    """The running statistics to update, and by how much."""

    mean: Tensor | None = None
    var: Tensor | None = None
    momentum: float = 0.1
    batches: Tensor | None = None  # counts them


class Affine(NamedTuple):
    """The map from x to y: per channel the mean, 1/σ, γ and β. Mean and 1/σ are float32 at least."""

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
        """Return the map from the saved tensor to y."""
        if keeps == "x":
            return self
        return Affine(torch.zeros_like(self.mean), torch.ones_like(self.invstd), self.weight, self.bias)


def statistics(x: Tensor, running: Running | None = None) -> tuple[Tensor, Tensor]:
    """The mean and the biased variance of each channel; the running statistics follow them."""
    held, wide = running or Running(), torch.promote_types(x.dtype, torch.float32)
    if held.batches is not None:
        held.batches.add_(1)
    if held.mean is None:  # without, ATen rounds those of a 16-bit x to 16 bits
        mean, var = x.new_zeros(2, x.shape[1], dtype=wide)
        held = Running(mean, var)
    mean, var = _aten.batch_norm_update_stats(x, held.mean, held.var, held.momentum)
    return mean.to(wide), var.to(wide)


def normalize(
    saved: Tensor,
    keeps: Keeps,
    affine: Affine,
    activation: Activation,
    slopes: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """φ(y), y from x or x̂. The same call gives the same bits, so forward and rebuilding agree."""
    pieces = _pieces(saved)
    if len(pieces) == 1:
        return activation.write(preactivation(saved, keeps, affine, residual), slopes)
    z = torch.empty_like(saved)
    for _, y in _in_pieces(saved, keeps, affine, residual, pieces, z):
        _put(y, activation.write(y, slopes))
    return z


def activation_backward(
    dz: Tensor, saved: Tensor, keeps: Keeps, affine: Affine, activation: Activation, residual: Tensor | None = None
) -> Tensor:
    """The gradient dy = dz·φ'(y), y from x or x̂, for an activation that learns nothing."""
    pieces = _pieces(saved) if dz.dtype == saved.dtype else [slice(None)]
    if len(pieces) == 1:
        return activation.backward(dz, preactivation(saved, keeps, affine, residual), write=True)[0]
    dy = torch.empty_like(saved)
    for piece, y in _in_pieces(saved, keeps, affine, residual, pieces, dy):
        _put(y, activation.backward(dz[piece], y, write=True)[0])
    return dy


def preactivation(saved: Tensor, keeps: Keeps, affine: Affine, residual: Tensor | None = None) -> Tensor:
    """The value before the activation, from x or x̂, by ATen's inference kernel, the fastest on a CPU."""
    y = _aten.native_batch_norm(saved, *_vectors(keeps, affine), False, 0.0, 0.0)[0]
    return y if residual is None else y.add_(residual)


def _vectors(keeps: Keeps, affine: Affine) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Weight, bias, mean and variance for it.

    γ/σ as the weight, over a variance of one: the bits of torch's own training step, and 1/σ is not rounded again.
    """
    a = affine.of_kept(keeps)
    return a.gamma * a.invstd, None if a.bias is None else a.beta, a.mean, torch.ones_like(a.mean)


def _in_pieces(
    saved: Tensor, keeps: Keeps, affine: Affine, residual: Tensor | None, pieces: list[slice], out: Tensor
) -> Iterator[tuple[slice, Tensor]]:
    """The value before the activation, written to ``out`` piece by piece."""
    vectors, none = _vectors(keeps, affine), affine.mean.new_empty(0)
    residual = None if residual is None else residual.expand_as(saved)
    for piece in pieces:
        y = out[piece]
        _aten.native_batch_norm.out(saved[piece], *vectors, False, 0.0, 0.0, out=y, save_mean=none, save_invstd=none)
        yield piece, y if residual is None else y.add_(residual[piece])


def _put(target: Tensor, values: Tensor) -> None:
    """Copy values to a target, unless they share its storage."""
    if storage_id(values.untyped_storage()) != storage_id(target.untyped_storage()):
        target.copy_(values)


def _pieces(x: Tensor) -> list[slice]:
    """The batch in pieces that a CPU's cache holds from one op to the next; elsewhere in one.

    A few at most: each is an op more to start, and to trace.
    """
    count = min(_MOST_PIECES, x.numel() * x.element_size() // _PIECE_BYTES, x.shape[0])
    if x.device.type != "cpu" or count < 2:
        return [slice(None)]
    samples = -(-x.shape[0] // count)
    return [slice(first, first + samples) for first in range(0, x.shape[0], samples)]


def input_backward(
    dy: Tensor, saved: Tensor, keeps: Keeps, affine: Affine, *, training: bool, sums: Sums | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dγ and dβ from dy and the saved x, x̂ or y (keeps "z")."""
    source, mean, invstd, weight = _as_batch(saved, keeps, affine)
    if 1 in dy.shape and dy.stride() != source.stride():
        # If a dimension is 1, ATen (2.13) takes a channels-last tensor for a contiguous one: wrong gradients.
        dy = torch.empty_like(source, dtype=dy.dtype).copy_(dy)
    if sums is not None:
        return _summed_backward(dy, source, mean, invstd, weight, sums)
    every = [True] * 3
    if training:
        return _aten.native_batch_norm_backward(dy, source, weight, None, None, mean, invstd, True, 0.0, every)
    # There ATen takes 1/σ from the variance, without its sign: that of γ where y stands for x.
    var, sign = invstd.square().reciprocal(), invstd.sign()
    back = _aten.native_batch_norm_backward(dy, source, weight * sign, mean, var, mean, invstd, False, 0.0, every)
    return back[0], back[1] * sign, back[2]


def _as_batch(saved: Tensor, keeps: Keeps, affine: Affine) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The saved tensor as the input of a batch norm that has the same x̂ and the same γ/σ."""
    if keeps == "x":
        return saved, affine.mean, affine.invstd, affine.gamma
    if keeps == "xhat":
        return saved, torch.zeros_like(affine.mean), torch.ones_like(affine.invstd), affine.gamma * affine.invstd
    return saved, affine.beta, 1 / affine.gamma, affine.gamma.square() * affine.invstd


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
