"""The optimizer in a traced step: state as in every step but the first, and no hooks of the user's in extra steps."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lowtide.compat.optimizers import all_step_hooks
from lowtide.tracing.step_state import optimizers_of


def init_optimizer_state(optimizer: torch.optim.Optimizer | None) -> list[Tensor]:
    """Make the state of parameters that have none, by one step on zero gradients. Return these parameters."""
    groups = [] if optimizer is None else optimizer.param_groups
    stepped = [parameter for group in groups for parameter in group["params"]]
    fresh = [p for p in stepped if optimizer is not None and p.requires_grad and p not in optimizer.state]
    if optimizer is None or not fresh:
        return []
    with torch.no_grad():
        for parameter in fresh:
            parameter.grad = _zero_gradient(parameter, optimizer)
        with without_step_hooks(optimizer):
            optimizer.step()
    for parameter in fresh:
        parameter.grad = None
    return fresh


def _zero_gradient(parameter: Tensor, optimizer: torch.optim.Optimizer) -> Tensor:
    if not isinstance(optimizer, torch.optim.SparseAdam):
        return torch.zeros_like(parameter)
    indices = torch.zeros(1, 1, dtype=torch.int64, device=parameter.device)
    values = torch.zeros(1, *parameter.shape[1:], dtype=parameter.dtype, device=parameter.device)
    return torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False)


@contextmanager
def without_step_hooks(optimizer: torch.optim.Optimizer) -> Generator[None]:
    """Disable the user's hooks in a step that is not the user's; keep lowtide's own."""
    hooks = [(held, dict(held)) for held in all_step_hooks(optimizers_of(optimizer))]
    for held, content in hooks:
        held.clear()
        held.update({key: hook for key, hook in content.items() if _is_part_of_step(hook)})
    try:
        yield
    finally:
        for held, content in hooks:
            held.clear()
            held.update(content)


def _is_part_of_step(hook: Any) -> bool:
    return getattr(getattr(hook, "__self__", None), "part_of_step", False)
