"""Optimizers: their hooks, and the marks that schedulers and gradient scalers leave on them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import wraps
from operator import attrgetter
from types import CellType
from typing import Any

import torch
from torch import Tensor

from lowtide.compat.versions import TRIED

step_pre_hooks: Callable[[Any], dict[int, Any]] = attrgetter("_optimizer_step_pre_hooks")
"""Return an optimizer's own dictionary of hooks before its step."""

load_pre_hooks: Callable[[Any], dict[int, Any]] = attrgetter("_optimizer_load_state_dict_pre_hooks")
"""Return an optimizer's own dictionary of hooks before a state is loaded."""

load_post_hooks: Callable[[Any], dict[int, Any]] = attrgetter("_optimizer_load_state_dict_post_hooks")
"""Return an optimizer's own dictionary of hooks after a state was loaded."""

FOREACH_TYPES: list[type] = TRIED.find("torch.optim.optimizer:_foreach_supported_types")
"""The types of parameters that optimizers step many at a time."""

AMP_SCALING = "_step_supports_amp_scaling"
"""The mark of fused optimizers: a ``GradScaler`` hands its scale to their own step."""

STEP_CALLED = "_opt_called"
"""The mark by which a scheduler knows that a step came before its own."""

_STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def register_first_step_pre_hook(optimizer: torch.optim.Optimizer, hook: Callable[..., Any]) -> Any:
    """Register a hook that runs before the step, and before all other such hooks. Return its handle."""
    handle = optimizer.register_step_pre_hook(hook)
    hooks: Any = step_pre_hooks(optimizer)
    hooks.move_to_end(handle.id, last=False)
    return handle


def all_step_hooks(optimizers: Iterable[Any]) -> list[dict[int, Any]]:
    """Return the dictionaries of hooks around steps: those of optimizers (a wrapper may have none) and of all."""
    own = [vars(each)[name] for each in optimizers for name in _STEP_HOOKS if name in vars(each)]
    return own + [TRIED.find(f"torch.optim.optimizer:_global_optimizer_{when}_hooks") for when in ("pre", "post")]


def remove_step_hooks(optimizer: Any) -> None:
    """Give an optimizer no hooks around its step. A copy that shares them leaves the original's alone."""
    for name in _STEP_HOOKS:
        setattr(optimizer, name, OrderedDict())


def copy_step_hooks(optimizer: Any) -> None:
    """Give a copy of an optimizer dictionaries of its own with the same hooks around its step."""
    for name in _STEP_HOOKS:
        if name in vars(optimizer):
            setattr(optimizer, name, OrderedDict(vars(optimizer)[name]))


@TRIED
def call_hooks_in_step(optimizer: Any) -> None:
    """Have the step of an optimizer's class call hooks, as its constructor does."""
    optimizer._patch_step_function()


def mark_step(optimizer: Any) -> None:
    """Tell schedulers that a step was done."""
    setattr(optimizer, STEP_CALLED, True)


def mark_wrapped(step: Callable[..., Any]) -> None:
    """Tell schedulers that a step marks the optimizer by itself: they do not wrap it again."""
    vars(step)["_wrapped_by_lr_sched"] = True


_CLIPPERS = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_")  # of torch.nn.utils


def watch_clipping(see: Callable[[Iterable[Tensor]], None]) -> Callable[[], None]:
    """Call ``see`` with the parameters that torch clips, however a loop imported that; the result ends it.

    Each function of torch's wraps another one in a closure, which is replaced there.
    """
    watched: list[tuple[CellType, Any, Any]] = []
    for name in _CLIPPERS:
        clip: Any = getattr(torch.nn.utils, name, None)
        inner: Any = getattr(clip, "__wrapped__", None)
        for cell in getattr(clip, "__closure__", None) or ():
            if inner is not None and cell.cell_contents is inner:
                cell.cell_contents = seen = _seen_by(see, inner)
                watched.append((cell, inner, seen))
    if not watched:
        raise TRIED.off("torch's clipping is of another form")

    def restore() -> None:
        for cell, inner, seen in watched:
            if cell.cell_contents is seen:  # nobody replaced it since
                cell.cell_contents = inner

    return restore


def _seen_by(see: Callable[[Iterable[Tensor]], None], clip: Any) -> Any:
    @wraps(clip)
    def seen(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        see(listed)
        return clip(listed or parameters, *args, **kwargs)  # torch warns of an empty generator

    return seen
