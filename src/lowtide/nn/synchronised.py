"""Batch statistics over all processes of a group: one collective forward, one backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lowtide.errors import LowtideError
from lowtide.kernels import batchnorm as kernels
from lowtide.kernels.reference.batchnorm import Running, Sums
from lowtide.nn.statistics import check_values

_PIECE = 2**17  # values
_ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"  # torch < 2.13


def group_statistics(x: Tensor, running: Running, group: Any) -> tuple[Tensor, Tensor, Sums]:
    """Return the mean and the biased variance of each channel over a process group's batches, without a sync.

    Batches may differ in size, and one may be empty. From each process's n values in a channel, their mean μ and
    variance v (Chan, Golub and LeVeque, 1979):

        N = Σ n      M = Σ nμ / N      V = Σ n(v + (μ - M)²) / N

    The third result is for backward: a function from the local Σ dy and Σ dy·x̂ to their means over the group. The
    running statistics follow M and V. DDP or FSDP reduces the gradients of γ and β, as with ``nn.SyncBatchNorm``.
    """
    members = process_group(group)
    if members.size() == 1:
        check_values(x, Running())
    counts, means, variances = _gathered(x, x.numel() // x.shape[1], members)
    total = counts.sum()
    at_least_one = total.clamp(min=1)  # where every batch is empty
    mean = (counts * means).sum(0) / at_least_one
    var = (counts * (variances + (means - mean).square())).sum(0) / at_least_one
    _follow(running, mean, var, total)

    def sums(dy: Tensor, dy_xhat: Tensor) -> tuple[Tensor, Tensor]:
        both = torch.stack([dy, dy_xhat])
        dist.all_reduce(both, group=members)
        return (both / at_least_one.to(both.dtype)).unbind()  # pyright: ignore[reportReturnType]

    wide = torch.promote_types(x.dtype, torch.float32)
    return mean.to(wide), var.to(wide), sums


def process_group(group: Any) -> dist.ProcessGroup:
    """The group itself, or for "world" the one of all processes.

    A layer that is to be pickled takes "world": a group cannot be.
    """
    hint = "Call torch.distributed.init_process_group() first, or give no process_group."
    if not (dist.is_available() and dist.is_initialized()):
        raise LowtideError("Statistics over a process group need one, and none is initialised", hint=hint)
    if group == "world":
        world = dist.group.WORLD
        assert world is not None
        return world
    if isinstance(group, dist.ProcessGroup):
        return group
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise LowtideError(
            "This process is not a member of the layer's process_group",
            hint="Give each process a group that it belongs to.",
        )
    raise LowtideError(f"{group!r} is not a process group", hint='Give a torch ProcessGroup, or "world" for all.')


def _gathered(x: Tensor, count: int, members: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """Gather a row from each process: count per channel, means, variances. In float64, so that counts are exact."""
    channels = x.shape[1]
    local = x.new_zeros(2 * channels + 1, dtype=torch.float64)
    if count:
        mean, var = kernels.statistics(x)
        local[0].fill_(count)
        local[1 : channels + 1].copy_(_mean(x) if x.device.type == "cpu" else mean)
        local[channels + 1 :].copy_(var)
    all_locals = local.new_empty(members.size() * len(local))
    getattr(dist, _ALL_GATHER)(all_locals, local, group=members)
    rows = all_locals.view(members.size(), len(local))
    return rows[:, :1], rows[:, 1 : channels + 1], rows[:, channels + 1 :]


def _mean(x: Tensor) -> Tensor:
    """The mean of each channel in float64, in small pieces, since a sum that casts copies its input.

    Rounded to float32 here and over the group again, a large mean would be less exact than that of one process.
    """
    axes = [axis for axis in range(x.dim()) if axis != 1]
    pieces = x.split(max(1, _PIECE // max(1, x[0].numel())))
    sums = torch.stack([piece.sum(axes, dtype=torch.float64) for piece in pieces]).sum(0)
    return sums / (x.numel() // x.shape[1])


def _follow(running: Running, mean: Tensor, var: Tensor, total: Tensor) -> None:
    """Move the running statistics; where every batch is empty, they stay."""
    step = running.momentum * total.clamp(max=1)
    unbiased = var * (total / (total - 1).clamp(min=1))
    for held, now in ((running.mean, mean), (running.var, unbiased)):
        if held is not None:
            held.lerp_(now.to(held.dtype), step.to(held.dtype))
