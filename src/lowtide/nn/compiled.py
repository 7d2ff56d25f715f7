"""Batch norm + activation under ``torch.compile``: ops of our own, and a mark that has z computed again.

No saved-tensor hooks there: the compiler decides what is kept between its two graphs. So normalising and activating is
one op, which the partitioner is told to run again in backward for whoever reads z; its own backward needs x alone.
Statistics are another op, which runs once. Whatever the strategy, x is what is kept: to choose by |β/γ|, as in-place
strategies must, would take the values.

Compiled code calls these ops hundreds of times a step. They are bare kernels of a library: ``torch.library.custom_op``
and a registered autograd formula take three times as long to call. Autograd is in an op that tracing decomposes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy

from lowtide.kernels import batchnorm as kernels
from lowtide.kernels.activations import Activation
from lowtide.kernels.reference.batchnorm import Affine, Running

_ops: Any = torch.ops.lowtide
_library = torch.library.Library("lowtide", "FRAGMENT")


def _op(schema: str, *, fake: Callable[..., Any] | None = None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as an op. Without a fake one, tracing decomposes it."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        name = schema.partition("(")[0]
        # The tag: Inductor need not copy x back to the layout that eager mode would have.
        _library.define(schema, tags=(torch.Tag.flexible_layout,))
        _library.impl(name, function, "CompositeImplicitAutograd" if fake is None else "CompositeExplicitAutograd")
        if fake is not None:
            torch.library.register_fake(f"lowtide::{name}", fake, lib=_library)
        return function

    return register


def statistics(x: Tensor, running: Running) -> tuple[Tensor, Tensor]:
    """The mean and the biased variance of each channel; the running statistics follow them.

    They follow by plain ops on values per channel: the compiler fuses those, and may not know the momentum's value.
    """
    mean, inverse = _ops.batch_statistics(x.detach())
    var = inverse.reciprocal().square()
    count = x.numel() // x.shape[1]
    for held, found in ((running.mean, mean), (running.var, var * (count / (count - 1)))):
        if held is not None:
            held.copy_(running.momentum * found + (1 - running.momentum) * held)
    return mean, var


def normalize_act(
    x: Tensor, affine: Affine, activation: Activation, residual: Tensor | None = None, *, rebuild: bool
) -> Tensor:
    """Z from x in training, of which x is kept; with ``rebuild``, readers do not keep z."""
    a, act, numbers = affine, activation, [float(number) for number in activation.numbers]
    return _ops.batch_norm_act(x, a.mean, a.invstd, a.weight, a.bias, act.learned, residual, act.name, numbers, rebuild)


def _fake_statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.new_empty(x.shape[1], dtype=wide), x.new_empty(x.shape[1], dtype=wide)


@_op("batch_statistics(Tensor x) -> (Tensor, Tensor)", fake=_fake_statistics)
def _statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """The mean and 1/σ of each channel."""
    return kernels.mean_and_inverse(x, fresh=True)


_INPUTS = "Tensor x, Tensor mean, Tensor invstd, Tensor? weight, Tensor? bias, Tensor? slopes, Tensor? residual"


@_op(f"batch_norm_act({_INPUTS}, str activation, float[] numbers, bool rebuild) -> Tensor")
def _batch_norm_act(*inputs: Any) -> Tensor:
    """Z from x, with gradients. The mean and 1/σ are those of x: gradients flow through them, though not to them."""
    return _NormalizeAct.apply(*inputs)  # pyright: ignore[reportReturnType]


def _fake_normalize_act(x: Tensor, *others: Any) -> Tensor:
    return torch.empty_like(x, memory_format=suggest_memory_format(x))


@_op(f"normalize_act({_INPUTS}, str activation, float[] numbers, bool rebuild) -> Tensor", fake=_fake_normalize_act)
def _normalize_act(
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    slopes: Tensor | None,
    residual: Tensor | None,
    activation: str,
    numbers: Sequence[float],
    rebuild: bool,
) -> Tensor:
    """Z from x."""
    act = Activation(activation, tuple(numbers))
    z = kernels.normalize(x, "x", Affine(mean, invstd, weight, bias), act, _learned(slopes), residual)
    return _laid_out(z, x)


def _fake_backward(
    dz: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    slopes: Tensor | None,
    residual: Tensor | None,
    joined: Tensor | None,
    activation: str,
    numbers: Sequence[float],
    wanted: Sequence[bool],
) -> tuple[Tensor, ...]:
    layout = suggest_memory_format(x)
    likes = (x, weight, bias, slopes, x)
    dtypes = (dz.dtype, None, None, None, dz.dtype)
    return tuple(
        torch.empty_like(like, dtype=dtype, memory_format=layout if like is x else torch.contiguous_format)
        if like is not None and want
        else x.new_empty(0)
        for like, dtype, want in zip(likes, dtypes, wanted, strict=True)
    )


@_op(
    f"normalize_act_backward(Tensor dz, {_INPUTS}, Tensor? joined, str activation, float[] numbers, bool[] wanted)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    fake=_fake_backward,
)
def _normalize_act_backward(
    dz: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    slopes: Tensor | None,
    residual: Tensor | None,
    joined: Tensor | None,
    activation: str,
    numbers: Sequence[float],
    wanted: Sequence[bool],
) -> tuple[Tensor, ...]:
    """dx, dγ, dβ, dslopes and dy, empty where not wanted. An op's result may not be its input: dy is not dz."""
    act, affine = Activation(activation, tuple(numbers)), Affine(mean, invstd, weight, bias)
    dx, dweight, dbias, dlearned, dy = kernels.backward(
        dz, x, "x", affine, act, _learned(slopes), residual, training=True, joined=joined, fresh=True
    )
    found = (
        _laid_out(dx, x),
        dweight if weight is None else dweight.to(weight.dtype),
        dbias if bias is None else dbias.to(bias.dtype),
        *(dlearned or [None]),
        _laid_out(dy, x) if wanted[-1] else None,
    )
    return tuple(g if g is not None and want else x.new_empty(0) for g, want in zip(found, wanted, strict=True))


class _NormalizeAct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        *tensors, residual, activation, numbers, rebuild = inputs
        z = _ops.normalize_act(*inputs)
        # As in eager mode: readers keep the z of a join that is not rebuilt, and its sign may be all that φ' takes.
        keeps_z = residual is not None and not rebuild and Activation(activation, tuple(numbers)).slope_from_sign
        ctx.save_for_backward(*tensors, *((None, z) if keeps_z else (residual, None)))
        ctx.activation, ctx.numbers = activation, numbers
        return z

    @staticmethod
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x_needs, _, _, *learned_need, residual_needs, _, _, _ = ctx.needs_input_grad
        linear = ctx.activation == "identity"
        wanted = [x_needs, *learned_need, residual_needs and not linear]
        found = _ops.normalize_act_backward(dz, *ctx.saved_tensors, ctx.activation, ctx.numbers, wanted)
        dx, dweight, dbias, dslopes, dy = (g if want else None for g, want in zip(found, wanted, strict=True))
        return dx, None, None, dweight, dbias, dslopes, dz if residual_needs and linear else dy, None, None, None


def _mark(mode: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Tell the partitioner to compute z again. A user's checkpoint region puts its own mark over this one."""
    z = mode.__torch_dispatch__(func, types, args, kwargs)
    node = next(iter(reversed(mode.tracer.graph.nodes)))
    if node.target is func and node.args[-1]:
        node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    return z


torch.library.register_torch_dispatch("lowtide::normalize_act", ProxyTorchDispatchMode, _mark, lib=_library)


def _laid_out(tensor: Tensor, x: Tensor) -> Tensor:
    """A result as the fake op lays it out."""
    if tensor.stride() == x.stride():
        return tensor
    return tensor.contiguous(memory_format=suggest_memory_format(x))


def _learned(slopes: Tensor | None) -> tuple[Tensor, ...]:
    return () if slopes is None else (slopes,)
