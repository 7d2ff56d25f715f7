"""A larger batch without another result: the learning rate scaled with it and warmed up; LARS and LAMB for more."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.optimizer import ParamsT

from lowtide.compat.optimizers import register_first_step_pre_hook
from lowtide.errors import LowtideError
from lowtide.optim.bridges import Bitsandbytes, import_bitsandbytes
from lowtide.optim.hooks import hook_owners
from lowtide.optim.in_backward import is_stepped_in_backward
from lowtide.optim.one_parameter import parameters_in
from lowtide.optim.state import convert
from lowtide.undo import Undo

RateRule = Literal["linear", "sqrt"]

RULES: tuple[RateRule, ...] = ("linear", "sqrt")
COUNT = "large_batch_steps"  # in the optimizer's first group, and so in its ``state_dict``


def scale_batch(
    optimizer: torch.optim.Optimizer,
    factor: float,
    *,
    warmup_steps: int,
    rule: RateRule = "linear",
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
    return LambdaLR(optimizer, WarmUp(_top(factor, warmup_steps, rule), warmup_steps))


def scale_rates(
    optimizer: torch.optim.Optimizer, factor: float, *, warmup_steps: int, rule: RateRule = "linear", bound: float = 0.0
) -> Undo:
    """Step as ``scale_batch`` would, without a scheduler to call: the rate is multiplied while a step runs.

    Between steps ``group["lr"]`` is unchanged, for your own schedulers. The first group counts the steps, and so its
    ``state_dict`` does. With a ``bound``, bitsandbytes steps torch's SGD as LARS, and Adam or AdamW as LAMB. An
    update's norm is then at most that share of the weight's.
    """
    top = _top(factor, warmup_steps, rule)
    if any(isinstance(owner, _ScaledStep) for owner in hook_owners(optimizer)):
        raise LowtideError("The rates are scaled already", hint="Call undo() of the first one before applying it.")
    if any(map(is_stepped_in_backward, parameters_in(optimizer))):
        raise LowtideError("Parameters that are stepped in backward have no step to scale the rates of")
    with Undo() as undo:
        if bound:
            undo.add(bound_updates(optimizer, bound))
        step = _ScaledStep(WarmUp(top, warmup_steps))
        undo.add(lambda: optimizer.param_groups[0].pop(COUNT, None))  # loading a state replaces the group
        undo.add(step.restore)
        # Before those that step parameters themselves.
        undo.add(register_first_step_pre_hook(optimizer, step.before).remove)
        undo.add(optimizer.register_step_post_hook(step.after).remove)
        return undo.keep()


def bound_updates(optimizer: torch.optim.Optimizer, bound: float) -> Undo:
    """Have bitsandbytes step torch's SGD with momentum as LARS, Adam and AdamW as LAMB, from where they are."""
    if bound <= 0 or type(optimizer) not in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW):
        raise LowtideError(
            f"{type(optimizer).__name__} has no updates that could be bounded by {bound}",
            hint="There is LARS for torch.optim.SGD with momentum and LAMB for Adam and AdamW; the bound is above 0.",
        )
    bounded = Bitsandbytes(optimizer, bits=32, bound=bound)
    return convert(optimizer, bounded.optimizer, bounded.lowered, bounded.raised)


class WarmUp:
    """From 1 to ``top``; an object, so that a scheduler with it can be saved."""

    def __init__(self, top: float, steps: int) -> None:
        self.top = top
        self.steps = steps

    def __call__(self, step: int) -> float:
        return self.top if step >= self.steps else 1 + (self.top - 1) * step / self.steps


class _ScaledStep:
    """Multiplies rates before a step and puts them back after it."""

    part_of_step = True  # a trace leaves hooks of the user's own out, but not this
    needs_step = "Scaled rates act while the optimizer steps"

    def __init__(self, multiple: WarmUp) -> None:
        self.multiple = multiple
        self._rates: list[tuple[dict[str, Any], Any]] = []

    def before(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Called by torch before a step."""
        self.restore()  # of a step that failed
        multiple = self.multiple(optimizer.param_groups[0].get(COUNT, 0))
        self._rates = [(group, group["lr"]) for group in optimizer.param_groups]
        for group, rate in self._rates:
            group["lr"] = rate * multiple

    def after(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Called by torch after a step."""
        self.restore()
        first = optimizer.param_groups[0]
        first[COUNT] = first.get(COUNT, 0) + 1

    def restore(self) -> None:
        """Give the rates back that a step found."""
        for group, rate in self._rates:
            group["lr"] = rate
        self._rates = []


def lars(params: ParamsT, lr: float, **options: Any) -> torch.optim.Optimizer:
    """LARS (You et al., 2017) of bitsandbytes: SGD with a rate for each layer from the norms of weight and gradient.

    ``max_unorm`` bounds the norm of an update by that share of the weight's.
    """
    options = {"momentum": 0.9, "max_unorm": 0.02, **options}
    return import_bitsandbytes().optim.LARS(params, lr=lr, **options)


def lamb(params: ParamsT, lr: float, **options: Any) -> torch.optim.Optimizer:
    """LAMB (You et al., 2019) of bitsandbytes: Adam with the norm of a layer's update bounded by that of its weight."""
    return import_bitsandbytes().optim.LAMB(params, lr=lr, **options)


def _top(factor: float, warmup_steps: int, rule: str) -> float:
    """Return the multiple of the rate after the warm-up."""
    if factor <= 0 or warmup_steps < 0 or rule not in RULES:
        raise LowtideError(
            f"factor={factor}, warmup_steps={warmup_steps}, rule={rule!r} cannot be",
            hint=f"The factor is above 0, there are 0 steps or more, and the rule is one of: {', '.join(RULES)}.",
        )
    return factor if rule == "linear" else factor**0.5
