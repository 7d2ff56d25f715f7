"""Batch Renormalization and its activation as one layer that keeps one buffer for backward.

With μ and σ of the batch and their running averages μ' and σ' (Ioffe, "Batch Renormalization", 2017):

    y = γ(x̂·r + d) + β      r = σ/σ' within [1/rmax, rmax]      d = (μ - μ')/σ' within [-dmax, dmax]

Backward takes r and d as constants, so this is batch norm with the weight γr and the bias γd + β.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lowtide.compat.autograd import in_backward
from lowtide.compat.modules import check_input
from lowtide.errors import LowtideError
from lowtide.kernels.reference.batchnorm import Running
from lowtide.nn.batchnorm import BatchNormAct1d, BatchNormAct2d, BatchNormAct3d, _BatchNormAct, is_symbolic
from lowtide.nn.functional import batch_norm_act
from lowtide.nn.statistics import Statistics, batch_statistics

Limit = float | Callable[[Tensor], float | Tensor]

RESTORED = "_lowtide_restored"  # marks a buffer's copy with the statistics before a recomputed part ran first


class _BatchRenormAct(_BatchNormAct):
    """Shared by the layers of all dimensions. To ``state_dict`` it is a plain batch norm, and in eval it is one.

    ``rmax`` and ``dmax`` are numbers, or functions of the tensor ``num_batches_tracked``; a function that returns a
    tensor avoids a sync. For the first ``warmup`` batches the layer is a plain batch norm.
    """

    rmax: Limit = 3.0
    dmax: Limit = 5.0
    warmup: int = 0

    def __init__(self, *args: Any, rmax: Limit = 3.0, dmax: Limit = 5.0, warmup: int = 0, **options: Any) -> None:
        """Other arguments are those of the batch norm layer."""
        if (isinstance(rmax, (int, float)) and rmax < 1) or (isinstance(dmax, (int, float)) and dmax < 0):
            raise LowtideError(f"rmax={rmax}, dmax={dmax} are not limits", hint="rmax is at least 1, dmax at least 0.")
        super().__init__(*args, **options)
        self.rmax, self.dmax, self.warmup = rmax, dmax, warmup

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        """φ(batch_renorm(input) + residual). Without a residual, φ(batch_renorm(input))."""
        if is_symbolic(input) or not self.training or (not input.numel() and self.process_group is None):
            return super().forward(input, residual)
        check_input(self, input)
        with torch.no_grad():
            statistics, r, d = self._correction(input)
        weight: Any = self.weight  # None where affine=False
        return batch_norm_act(
            input,
            r if weight is None else weight * r,
            _shifted(d, weight, self.bias),
            activation=self._act,
            strategy=self.strategy,
            eps=self.eps,
            residual=residual,
            rebuild=residual is None or self.rebuild_joins,
            group=self.process_group,
            statistics=statistics,
            layer=self,
        )

    def _correction(self, input: Tensor) -> tuple[Statistics, Tensor, Tensor]:
        """Return the statistics of the batch, and r and d against the running ones before it."""
        mean, var, count = self.running_mean, self.running_var, self.num_batches_tracked
        if in_backward() and not getattr(mean, RESTORED, False):
            raise LowtideError(
                "Batch Renormalization reads its running statistics, which have moved since the checkpoint's first run",
                where=repr(self),
                hint="Leave the layer out of the checkpoint, or let a lowtide plan choose what to recompute.",
            )
        if mean is None or var is None or count is None:
            raise LowtideError("Batch Renormalization needs running statistics, and none are tracked", where=repr(self))
        rmax = self.rmax if isinstance(self.rmax, (int, float)) else self.rmax(count)
        dmax = self.dmax if isinstance(self.dmax, (int, float)) else self.dmax(count)
        warm = count >= self.warmup
        before = mean.clone()
        invstd_before = torch.rsqrt(var + self.eps)
        count.add_(1)
        momentum = 1.0 / float(count) if self.momentum is None else self.momentum
        statistics = batch_statistics(input, Running(mean, var, momentum), self.process_group)
        r = torch.sqrt(statistics.var + self.eps) * invstd_before
        d = (statistics.mean - before) * invstd_before
        r = torch.where(warm, torch.clamp(r, *_bounds(1 / rmax, rmax, like=r)), 1)
        d = torch.where(warm, torch.clamp(d, *_bounds(-dmax, dmax, like=d)), 0)
        return statistics, r, d

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, rmax={self.rmax}, dmax={self.dmax}, warmup={self.warmup}"


def _shifted(d: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """The bias of the batch norm that this is: γd + β."""
    d = d if weight is None else weight * d
    return d if bias is None else d + bias


def _bounds(low: Any, high: Any, *, like: Tensor) -> tuple[Any, Any]:
    """Both as ``torch.clamp`` wants them: numbers, or tensors where a schedule gave one."""
    return tuple(bound.to(like) if isinstance(bound, Tensor) else bound for bound in (low, high))  # pyright: ignore


class BatchRenormAct1d(_BatchRenormAct, BatchNormAct1d):
    """φ(batch_renorm(x)) of shape (N, C) or (N, C, L) with one buffer kept."""


class BatchRenormAct2d(_BatchRenormAct, BatchNormAct2d):
    """φ(batch_renorm(x)) of shape (N, C, H, W) with one buffer kept.

    The paper lets rmax grow from 1 to 3 between its steps 5000 and 40000:

    >>> layer = BatchRenormAct2d(8, "relu", rmax=lambda step: 1 + 2 * ((step - 5000) / 35000).clamp(0, 1))
    >>> layer(torch.randn(4, 8, 5, 5)).shape, list(layer.state_dict()) == list(torch.nn.BatchNorm2d(8).state_dict())
    (torch.Size([4, 8, 5, 5]), True)
    """


class BatchRenormAct3d(_BatchRenormAct, BatchNormAct3d):
    """φ(batch_renorm(x)) of shape (N, C, D, H, W) with one buffer kept."""
