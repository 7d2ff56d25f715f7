"""Reasons for which a captured step differs from the planned one: modes, hooks, trained parameters, autocast."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from lowtide.compat.modules import hooks_of
from lowtide.engines.watch import ForwardWatch
from lowtide.tracing.capture.joint import Joint
from lowtide.tracing.dense_parts import leaves
from lowtide.workload import Workload


def step_difference(joint: Joint, work: Workload, planned: ModelSetting) -> str:
    """Name the reason why a batch of the planned shape runs another step."""
    difference = planned.difference(ModelSetting.of(work.model))
    if difference:
        return difference
    if not work.autocast and _is_half(joint.forward) and not _is_half(joint.primals):
        return "it runs under an autocast that was not planned. Plan with Workload(..., autocast=...)"
    if joint.stored:
        return "the model stores tensors on itself, as in a first step"
    return "the loss runs other ops, as where a number or an attribute that it reads has changed"


@dataclass(frozen=True)
class ModelSetting:
    """Modes, hooks and trained parameters, by name: they decide which ops a model runs."""

    modes: Mapping[str, bool]
    hooks: Mapping[str, int]
    trained: Mapping[str, bool]

    @classmethod
    def of(cls, model: nn.Module) -> ModelSetting:
        modules = dict(model.named_modules())
        return cls(
            {name: module.training for name, module in modules.items()},
            {name: _hooks(module) for name, module in modules.items()},
            {name: parameter.requires_grad for name, parameter in model.named_parameters()},
        )

    def difference(self, now: ModelSetting) -> str:
        """Name the first module or parameter that differs; "" if none does."""
        if name := _first_unlike(self.modes, now.modes):
            mode = "training" if now.modes.get(name, now.modes[""]) else "evaluation"
            return f"{name} is in {mode} mode now"
        if name := _first_unlike(self.hooks, now.hooks):
            return f"{name} has other hooks"
        if name := _first_unlike(self.trained, now.trained):
            return f"{name} is {'trained' if now.trained.get(name) else 'frozen'} now"
        return ""


def _is_half(nodes: Iterable[fx.Node]) -> bool:
    """Tell whether a value is of a dtype that autocast computes in."""
    values = (value for node in nodes for value in leaves(node.meta.get("val")))
    return any(value.dtype in (torch.bfloat16, torch.float16) for value in values)


def _first_unlike(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    unlike = (name or "the model" for name in now if before.get(name) != now[name])
    return next(unlike, "")


def _hooks(module: nn.Module) -> int:
    return sum(not isinstance(hook, ForwardWatch) for hook in hooks_of(module))
