"""The step without a plan's options, to be predicted while they act on its optimizer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lowtide.compat.autograd import gradient_hooks
from lowtide.compat.optimizers import copy_step_hooks
from lowtide.workload import Workload


class PlainStep:
    """Make it before options are applied: it knows the optimizer's class, groups and hooks as they are then.

    States are left out: fake steps make their own, and later ones may be in another form.
    """

    def __init__(self, work: Workload, *, is_changed: bool) -> None:
        self._work = work
        self._hooks: dict[Tensor, set[int]] = {}
        if is_changed and work.optimizer is not None:
            parameters = [p for group in work.optimizer.param_groups for p in group["params"]]
            self._hooks = {parameter: set(gradient_hooks(parameter)) for parameter in parameters}
            self._work = replace(work, optimizer=_without_state(work.optimizer))

    @contextmanager
    def __call__(self, batch: Any) -> Generator[Workload]:
        """Yield the step with another batch, and set aside the hooks that options put on parameters."""
        aside: list[tuple[dict[int, Any], int, Any]] = []
        for parameter, known in self._hooks.items():
            hooks = gradient_hooks(parameter)
            aside += [(hooks, key, hooks.pop(key)) for key in list(hooks) if key not in known]
        try:
            yield replace(self._work, batch=batch)
        finally:
            for hooks, key, hook in aside:
                hooks[key] = hook


def _without_state(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """A copy of the optimizer over the same parameters, with hooks and groups of its own."""
    other = object.__new__(type(optimizer))  # copy.copy() would have torch change the class, for hooks
    other.__dict__ = dict(optimizer.__dict__)
    copy_step_hooks(other)
    other.param_groups = [dict(group) for group in optimizer.param_groups]
    other.state = defaultdict(dict)
    return other
