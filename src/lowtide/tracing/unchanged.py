"""The promise that a trace changes nothing: values, gradients, buffers, optimizer state, generators."""

from __future__ import annotations

import random
from collections.abc import Generator, Iterable
from contextlib import ExitStack, contextmanager
from itertools import chain
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lowtide.batches import map_tensors
from lowtide.tracing.held import (
    clear_gradients,
    holders,
    kept_tensors,
    modules_of,
    parameters_of,
    state_tensors,
    trainable,
    watch_modules,
)
from lowtide.tracing.internals import autograd, gradient_hooks
from lowtide.workload import Workload


@contextmanager
def unchanged(work: Workload, *, fake: bool = False) -> Generator[None]:
    """Put the model, its gradients and buffers, the optimizer and the generators back as they were.

    Modules that the loss holds, such as a criterion, count as the model's, whether they are its own or its object's, in
    its closure, bound to it or global. A fake step cannot change values, so
    nothing is copied for it. What they hold is theirs too, in containers, objects and what hooks close over. What is
    neither in them nor in the batch (a generator of the user's own, a file) is beyond it.
    """
    with ExitStack() as stack:
        stack.callback(_restore_generators, _generators())
        modules = modules_of(work)
        for holder in (*holders(work), *(module.__dict__ for module in modules)):
            stack.callback(_restore_content, holder, dict(holder) if isinstance(holder, dict) else list(holder))
        parameters = parameters_of(work)
        leaves = trainable(work)
        stack.callback(_restore_gradients, leaves, [leaf.grad for leaf in leaves])
        for leaf in leaves:
            leaf.grad = None
        for store in _stores(parameters):
            stack.callback(store.set_aside())
        if work.optimizer is not None:
            stack.callback(_restore_optimizer, work.optimizer, *_optimizer_snapshot(work.optimizer))
        if not fake:
            buffers = [b for module in modules for b in module._buffers.values() if b is not None]
            backups = {id(t): _Backup(t, counts=False) for t in (*buffers, *parameters, *state_tensors(work.optimizer))}
            for tensor in (*work.tensors(), *(kept for _, kept in kept_tensors(work))):
                if id(tensor) not in backups and not tensor.is_inference():  # that cannot be written to
                    backups[id(tensor)] = _Backup(tensor)
            stack.callback(_restore_values, list(backups.values()))
        yield


@contextmanager
def steady(work: Workload) -> Generator[bool]:
    """The model as a step leaves it, if that makes other tensors for it to keep; afterwards it is as it was.

    Yields whether it was so before.
    """
    with ExitStack() as stack:
        stack.enter_context(unchanged(work))
        is_steady = watch_modules(work)
        work.compute_loss(batch=map_tensors(lambda tensor: tensor, work.batch)).backward()
        was_steady = is_steady()
        if was_steady:
            stack.close()
        else:
            clear_gradients(work)
        yield was_steady


class _Backup:
    """A tensor's values, kept on the host, and its version.

    Batch norm writes its running statistics without counting, a fused optimizer what it trains, and so does who writes
    through ``.data``: ``counts=False`` restores whatever the version says.
    """

    def __init__(self, tensor: Tensor, *, counts: bool = True) -> None:
        self.tensor = tensor
        self.counts = counts
        self.version = tensor._version
        self.values = tensor.detach().to("cpu", copy=True)

    def restore(self) -> None:
        if self.counts and self.tensor._version == self.version:
            return
        with torch.no_grad():
            self.tensor.detach().copy_(self.values)
        autograd._unsafe_set_version_counter((self.tensor,), (self.version,))


def _restore_values(backups: list[_Backup]) -> None:
    for backup in backups:
        backup.restore()


def _stores(parameters: list[Tensor]) -> set[Any]:
    """What keeps gradients elsewhere than in ``.grad`` until the step."""
    hooks = (hook for parameter in parameters for hook in gradient_hooks(parameter).values())
    return {hook for hook in hooks if hasattr(hook, "set_aside")}


def _restore_gradients(parameters: list[Tensor], gradients: list[Tensor | None]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


def _restore_content(holder: Any, content: dict[Any, Any] | list[Any]) -> None:
    """Take back what the step put somewhere, such as a cache of fake tensors."""
    if len(holder) != len(content) or not all(map(is_, _items(holder), _items(content))):
        holder.clear()
        (holder.update if isinstance(holder, (dict, set)) else holder.extend)(content)


def _items(holder: Any) -> Iterable[Any]:
    return chain(holder, holder.values()) if isinstance(holder, dict) else holder


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
