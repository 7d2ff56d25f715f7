"""The promise that a trace changes nothing: values, gradients, buffers, optimizer state, generators."""

from __future__ import annotations

import random
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lowtide.tracing.internals import autograd
from lowtide.workload import Workload


@contextmanager
def unchanged(work: Workload, *, fake: bool = False) -> Generator[None]:
    """Put the model, its gradients and buffers, the optimizer and the generators back as they were.

    A fake step cannot change values, so nothing is copied for it.
    """
    with ExitStack() as stack:
        stack.callback(_restore_generators, _generators())
        for module in work.model.modules():
            stack.callback(_restore_attributes, module, dict(module.__dict__))
        parameters = parameters_of(work)
        gradients = [p.grad for p in parameters]
        stack.callback(_restore_gradients, parameters, gradients)
        for p in parameters:
            p.grad = None
        if work.optimizer is not None:
            stack.callback(_restore_optimizer, work.optimizer, *_optimizer_snapshot(work.optimizer))
        if not fake:
            values = [*parameters, *work.model.buffers(), *state_tensors(work.optimizer), *work.tensors()]
            stack.callback(_restore_values, [_Backup(tensor) for tensor in values])
        yield


class _Backup:
    """A tensor's values, kept on the host, and its version."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.version = tensor._version
        self.values = tensor.detach().to("cpu", copy=True)

    def restore(self) -> None:
        # Not only where the version moved: batch norm writes its running statistics without counting.
        with torch.no_grad():
            self.tensor.detach().copy_(self.values)
        autograd._unsafe_set_version_counter((self.tensor,), (self.version,))


def _restore_values(backups: list[_Backup]) -> None:
    for backup in backups:
        backup.restore()


def parameters_of(work: Workload) -> list[Tensor]:
    found: dict[Tensor, None] = dict.fromkeys(work.model.parameters())
    if work.optimizer is not None:
        found.update(dict.fromkeys(p for group in work.optimizer.param_groups for p in group["params"]))
    return list(found)


def state_tensors(optimizer: torch.optim.Optimizer | None, parameters: list[Tensor] | None = None) -> list[Tensor]:
    """The tensors of an optimizer's state: of some parameters, or of all."""
    if optimizer is None:
        return []
    chosen = list(optimizer.state) if parameters is None else parameters
    return [value for p in chosen for value in optimizer.state[p].values() if isinstance(value, Tensor)]


def _restore_gradients(parameters: list[Tensor], gradients: list[Tensor | None]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


def _restore_attributes(module: nn.Module, attributes: dict[str, Any]) -> None:
    """Take back what the forward pass set on a module, such as a cache of fake tensors."""
    module.__dict__.clear()
    module.__dict__.update(attributes)


def _optimizer_snapshot(optimizer: torch.optim.Optimizer) -> tuple[Any, ...]:
    states = {parameter: dict(state) for parameter, state in optimizer.state.items()}
    groups = [dict(group) for group in optimizer.param_groups]
    return dict(optimizer.__dict__), states, groups


def _restore_optimizer(
    optimizer: torch.optim.Optimizer,
    attributes: dict[str, Any],
    states: dict[Tensor, dict[str, Any]],
    groups: list[dict[str, Any]],
) -> None:
    optimizer.__dict__.clear()
    optimizer.__dict__.update(attributes)
    for parameter in list(optimizer.state):
        if parameter not in states:
            del optimizer.state[parameter]
    for parameter, state in states.items():
        held = optimizer.state[parameter]
        held.clear()
        held.update(state)
    for group, original in zip(optimizer.param_groups, groups, strict=True):
        group.clear()
        group.update(original)


def _generators() -> tuple[Any, ...]:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
    return torch.get_rng_state(), cuda, random.getstate(), np.random.get_state()


def _restore_generators(states: tuple[Any, ...]) -> None:
    cpu, cuda, python, numpy = states
    torch.set_rng_state(cpu)
    if cuda is not None:
        torch.cuda.set_rng_state_all(cuda)
    random.setstate(python)
    np.random.set_state(numpy)
