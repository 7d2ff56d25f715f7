"""A larger batch without another result: the learning rate scaled with it and warmed up; LARS and LAMB for more."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.optimizer import ParamsT

from lowtide.errors import LowtideError, MissingExtra


def scale_batch(
    optimizer: torch.optim.Optimizer,
    factor: float,
    *,
    warmup_steps: int,
    rule: Literal["linear", "sqrt"] = "linear",
) -> LambdaLR:
    """A scheduler for a batch ``factor`` times as large: from the optimizer's rate up to ``factor`` times it.

    "linear" is for SGD (Goyal et al., 2017), "sqrt" customary for Adam. The rate starts where it is and rises evenly
    over ``warmup_steps``; call ``step()`` after each of the optimizer's.

    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    >>> scheduler = scale_batch(optimizer, 4, warmup_steps=3)
    >>> for _ in range(3):
    ...     optimizer.step()
    ...     scheduler.step()
    ...     print(round(optimizer.param_groups[0]["lr"], 3))
    0.2
    0.3
    0.4
    """
    if factor <= 0 or warmup_steps < 0 or rule not in ("linear", "sqrt"):
        raise LowtideError(f"factor={factor}, warmup_steps={warmup_steps}, rule={rule!r} cannot be")
    top = factor if rule == "linear" else factor**0.5
    return LambdaLR(optimizer, _WarmUp(top, warmup_steps))


class _WarmUp:
    """From 1 to ``top``; an object, so that the scheduler can be saved."""

    def __init__(self, top: float, steps: int) -> None:
        self.top = top
        self.steps = steps

    def __call__(self, step: int) -> float:
        return self.top if step >= self.steps else 1 + (self.top - 1) * step / self.steps


def lars(params: ParamsT, lr: float, **options: Any) -> torch.optim.Optimizer:
    """LARS (You et al., 2017) of bitsandbytes: SGD with a rate for each layer from the norms of weight and gradient.

    ``max_unorm`` bounds the norm of an update by that share of the weight's.
    """
    options = {"momentum": 0.9, "max_unorm": 0.02, **options}
    return _bitsandbytes().optim.LARS(params, lr=lr, **options)


def lamb(params: ParamsT, lr: float, **options: Any) -> torch.optim.Optimizer:
    """LAMB (You et al., 2019) of bitsandbytes: Adam with the norm of a layer's update bounded by that of its weight."""
    return _bitsandbytes().optim.LAMB(params, lr=lr, **options)


def _bitsandbytes() -> Any:
    try:
        import bitsandbytes
    except ImportError as error:
        raise MissingExtra("bitsandbytes", extra="optim") from error
    return bitsandbytes
