"""Statistics of a batch, and the running ones that follow them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowtide.kernels import batchnorm as kernels
from lowtide.kernels.reference.batchnorm import Running, Sums


class Statistics(NamedTuple):
    """The mean and the biased variance of each channel; over a process group, also how backward sums over it.

    ``of_input``: False for statistics of more than this call's input.
    """

    mean: Tensor
    var: Tensor
    sums: Sums | None = None
    of_input: bool = True


def batch_statistics(x: Tensor, running: Running, group: Any = None) -> Statistics:
    """Measure the statistics of this batch, or of a process group's batches, and update the running ones."""
    if group is not None:
        from lowtide.nn.synchronised import group_statistics

        count_batch(running)
        return Statistics(*group_statistics(x, running, group))
    check_values(x, running)
    if torch.compiler.is_compiling():
        count_batch(running)
        return compiled_statistics(x, running)
    return Statistics(*kernels.statistics(x, running))


def copied(running: Running) -> Running:
    """Copy statistics for a recomputation to move. Not None: a checkpoint compares what both runs save."""
    mean, var = (None if t is None else t.clone() for t in (running.mean, running.var))
    return Running(mean, var, running.momentum)


def compiled_statistics(x: Tensor, running: Running) -> Statistics:
    """Measure the same by plain ops, for a compiler."""
    wide, count = torch.promote_types(x.dtype, torch.float32), x.numel() // x.shape[1]
    # As Inductor decomposes a batch norm: it then merges the two.
    var, mean = torch.var_mean(x.detach().to(wide), [0, *range(2, x.dim())], correction=0, keepdim=True)
    mean, var = mean.flatten(), var.flatten()
    for held, now in ((running.mean, mean), (running.var, var * (count / (count - 1)))):
        if held is not None:
            held.copy_(running.momentum * now + (1 - running.momentum) * held)
    return Statistics(mean, var)


def count_batch(running: Running) -> None:
    """Count a batch, where the kernels do not."""
    if running.batches is not None:
        running.batches.add_(1)


def check_values(x: Tensor, running: Running) -> None:
    """Raise torch's error where a channel has one value alone."""
    if x.numel() == x.shape[1]:
        count_batch(running)  # as torch does
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {x.shape}")
