"""Batch norm + activation under ``torch.compile``: ops of our own, and a mark that has z computed again.

No saved-tensor hooks there: the compiler decides what is kept between its two graphs. So normalising and activating is
one op, which the partitioner is told to run again in backward for whoever reads z; its own backward needs x alone.
Statistics are another op, which runs once. Whatever the strategy, x is what is kept: to choose by |β/γ|, as in-place
strategies must, would take the values.
"""

from __future__ import annotations

from collections.abc import Sequence
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
_ANY_LAYOUT = (torch.Tag.flexible_layout,)  # Inductor need not copy x back to the layout that eager mode would have


def statistics(x: Tensor, running: Running) -> tuple[Tensor, Tensor]:
    """The mean and the biased variance of each channel; the running statistics follow them.

    They follow by plain ops on values per channel: the compiler fuses those, and may not know the momentum's value.
    """
    mean, var = _ops.batch_statistics(x.detach())
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
    return _ops.normalize_act(x, a.mean, a.invstd, a.weight, a.bias, act.learned, residual, act.name, numbers, rebuild)


@torch.library.custom_op("lowtide::batch_statistics", mutates_args=(), tags=_ANY_LAYOUT)
def _statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """The mean and the biased variance of each channel."""
    return kernels.statistics(x, fresh=True)


@_statistics.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.new_empty(x.shape[1], dtype=wide), x.new_empty(x.shape[1], dtype=wide)


@torch.library.custom_op("lowtide::normalize_act", mutates_args=(), tags=_ANY_LAYOUT)
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
    """Z from x. The mean and 1/σ are those of x: gradients flow through them, though not to them."""
    act = Activation(activation, tuple(numbers))
    z = kernels.normalize(x, "x", Affine(mean, invstd, weight, bias), act, _learned(slopes), residual)
    return z.contiguous(memory_format=suggest_memory_format(x))


@_normalize_act.register_fake
def _(x: Tensor, *others: Any) -> Tensor:
    return torch.empty_like(x, memory_format=suggest_memory_format(x))


@torch.library.custom_op("lowtide::normalize_act_backward", mutates_args=(), tags=_ANY_LAYOUT)
def _normalize_act_backward(
    dz: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    slopes: Tensor | None,
    residual: Tensor | None,
    activation: str,
    numbers: Sequence[float],
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dx, dγ, dβ, dslopes and dy, empty where not wanted. An op's result may not be its input: dy is not dz."""
    act, learned = Activation(activation, tuple(numbers)), _learned(slopes)
    affine = Affine(mean, invstd, weight, bias)
    dx, dweight, dbias, dlearned, dy = kernels.backward(
        dz, x, "x", affine, act, learned, residual, training=True, fresh=True
    )
    layout = suggest_memory_format(x)
    found = (
        dx.contiguous(memory_format=layout),
        dweight if weight is None else dweight.to(weight.dtype),
        dbias if bias is None else dbias.to(bias.dtype),
        *(dlearned or [None]),
        dy.contiguous(memory_format=layout),
    )
    a, b, c, d, e = (g if g is not None and want else x.new_empty(0) for g, want in zip(found, wanted, strict=True))
    return a, b, c, d, e


@_normalize_act_backward.register_fake
def _(
    dz: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    slopes: Tensor | None,
    residual: Tensor | None,
    activation: str,
    numbers: Sequence[float],
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    layout = suggest_memory_format(x)
    likes = (x, weight, bias, slopes, x)
    dtypes = (dz.dtype, None, None, None, dz.dtype)
    a, b, c, d, e = (
        torch.empty_like(like, dtype=dtype, memory_format=layout if like is x else torch.contiguous_format)
        if like is not None and want
        else x.new_empty(0)
        for like, dtype, want in zip(likes, dtypes, wanted, strict=True)
    )
    return a, b, c, d, e


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.activation, ctx.numbers, _ = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
    x_needs, _, _, *learned_need, residual_needs, _, _, _ = ctx.needs_input_grad
    linear = ctx.activation == "identity"
    wanted = [x_needs, *learned_need, residual_needs and not linear]
    found = _ops.normalize_act_backward(dz, *ctx.saved_tensors, ctx.activation, ctx.numbers, wanted)
    dx, dweight, dbias, dslopes, dy = (g if want else None for g, want in zip(found, wanted, strict=True))
    return dx, None, None, dweight, dbias, dslopes, dz if residual_needs and linear else dy, None, None, None


_normalize_act.register_autograd(_gradients, setup_context=_keep)


def _mark(mode: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Tell the partitioner to compute z again. A user's checkpoint region puts its own mark over this one."""
    z = mode.__torch_dispatch__(func, types, args, kwargs)
    node = next(iter(reversed(mode.tracer.graph.nodes)))
    if node.target is func and node.args[-1]:
        node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    return z


_normalize_act.register_torch_dispatch(ProxyTorchDispatchMode, _mark)


def _learned(slopes: Tensor | None) -> tuple[Tensor, ...]:
    return () if slopes is None else (slopes,)
