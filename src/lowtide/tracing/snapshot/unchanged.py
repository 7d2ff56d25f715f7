"""The promise that a trace changes nothing: values, gradients, buffers, optimizer state, generators."""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from collections.abc import Generator, Iterable
from contextlib import ExitStack, contextmanager
from itertools import chain
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lowtide.batches import with_own_containers
from lowtide.compat.autograd import gradient_hooks, set_version_counters
from lowtide.compat.dispatch import is_wrapper
from lowtide.compat.tensors import version_of
from lowtide.tracing.snapshot.held_tensors import (
    clear_gradients,
    holders,
    kept_tensors,
    modules_of,
    optimizers_of,
    parameters_of,
    state_tensors,
    trainable,
    watch_modules,
)
from lowtide.tracing.snapshot.restoring import Restoring
from lowtide.workload import Workload


@contextmanager
def unchanged(work: Workload, *, fake: bool = False) -> Generator[None]:
    """Restore the model, its gradients and buffers, the optimizer and the generators.

    Modules that the loss holds, such as a criterion, count as the model's, whether they are its own or its object's, in
    its closure, bound to it or global. A fake step cannot change values, so
    nothing is copied for it. What they hold is theirs too, in containers, objects and what hooks close over. What is
    neither in them nor in the batch (a generator of the user's own, a file) is beyond it.
    """
    with Restoring() as restoring:
        _keep_generators(restoring)
        modules = modules_of(work)
        for holder in (*holders(work), *(module.__dict__ for module in modules)):
            _keep_content(restoring, "what modules hold", holder)
        parameters = parameters_of(work)
        names = _Names(work)
        for leaf in trainable(work):
            restoring.add(f"the gradient of {names[leaf]}", setattr, leaf, "grad", leaf.grad)
            leaf.grad = None
        for store in _stores(parameters):
            restoring.add("stored gradients", store.set_aside())
        optimizers = optimizers_of(work.optimizer)
        for optimizer in optimizers:
            _keep_optimizer(restoring, optimizer, names)
        kept = {id(tensor): tensor for _, tensor in kept_tensors(work)}
        if not fake:
            near = {id(tensor) for _, tensor in kept_tensors(work, depth=1)}
            copied = [t for key, t in kept.items() if key in near or t.device.type == work.device.type]
            written = {id(t): t for t in (*copied, *parameters, *chain.from_iterable(map(state_tensors, optimizers)))}
            backups = [_Backup(tensor, counts=False) for tensor in written.values() if _has_values(tensor)]
            backups += [_Backup(t) for t in work.tensors() if id(t) not in written and _has_values(t)]
            for backup in backups:
                restoring.add(names[backup.tensor], backup.restore)
        for tensor in kept.values():
            if type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_inference():
                restoring.add(names[tensor], _restore_data, tensor, tensor.data)
        yield


@contextmanager
def steady(work: Workload) -> Generator[bool]:
    """Run with the model as a step leaves it, if the step replaces held tensors; then restore it.

    Yields whether it was so before.
    """
    with ExitStack() as stack:
        stack.enter_context(unchanged(work))
        kept_since = watch_modules(work)
        work.compute_loss(batch=with_own_containers(work.batch)).backward()
        was_steady = not kept_since()
        if was_steady:
            stack.close()
        else:
            clear_gradients(work)
        yield was_steady


class _Backup:
    """A tensor's values, copied to the host, and its version.

    Batch norm writes its running statistics without counting, a fused optimizer what it trains, and so does who writes
    through ``.data``: ``counts=False`` restores whatever the version says.
    """

    def __init__(self, tensor: Tensor, *, counts: bool = True) -> None:
        self.tensor = tensor
        self.counts = counts
        self.version = version_of(tensor)
        self.values = _distinct(tensor).to("cpu", copy=True)

    def restore(self) -> None:
        if self.counts and version_of(self.tensor) == self.version:
            return
        _distinct(self.tensor).copy_(self.values)
        set_version_counters((self.tensor,), (self.version,))


def _distinct(tensor: Tensor) -> Tensor:
    """The tensor without repeated elements, such as those of an expanded one."""
    tensor = tensor.detach()
    if tensor.layout is torch.strided and not is_wrapper(tensor):
        for dim, stride in enumerate(tensor.stride()):
            tensor = tensor.narrow(dim, 0, 1) if stride == 0 and tensor.shape[dim] > 1 else tensor
    return tensor


def _has_values(tensor: Tensor) -> bool:
    """Whether a tensor has values that can be copied and restored."""
    return not tensor.is_meta and not tensor.is_inference() and not tensor.is_mkldnn


def _restore_data(tensor: Tensor, data: Tensor) -> None:
    """Undo ``tensor.data = ...``, which no version counts."""
    if tensor.device != data.device or tensor.shape != data.shape or tensor.data_ptr() != data.data_ptr():
        tensor.data = data


def _stores(parameters: list[Tensor]) -> set[Any]:
    """Objects that hold gradients elsewhere than in ``.grad`` until the step."""
    hooks = (hook for parameter in parameters for hook in gradient_hooks(parameter).values())
    return {hook for hook in hooks if hasattr(hook, "set_aside")}


class _Names:
    """Tensors as an error names them."""

    def __init__(self, work: Workload) -> None:
        found = [(tensor, name) for name, tensor in kept_tensors(work)]
        found += [(tensor, "the batch") for tensor in work.tensors()]
        found += [(tensor, name) for name, tensor in (*work.model.named_buffers(), *work.model.named_parameters())]
        self._names = {id(tensor): name for tensor, name in found}
        for parameter, state in work.optimizer.state.items() if work.optimizer is not None else ():
            for key, value in state.items():
                self._names[id(value)] = f"the optimizer's {key} of {self[parameter]}"

    def __getitem__(self, tensor: Any) -> str:
        return self._names.get(id(tensor), "a parameter outside of the model")


def _keep_content(restoring: Restoring, what: str, holder: Any) -> None:
    restoring.add(what, restore_content, holder, content_of(holder))


def content_of(holder: Any) -> dict[Any, Any] | list[Any]:
    """A copy of what a container holds."""
    return dict(holder) if isinstance(holder, dict) else list(holder)


def holds(holder: Any, content: dict[Any, Any] | list[Any]) -> bool:
    """Whether a container holds the same objects in the same order."""
    return len(holder) == len(content) and all(map(is_, _items(holder), _items(content)))


def restore_content(holder: Any, content: dict[Any, Any] | list[Any]) -> None:
    """Restore a container, such as a cache of fake tensors; by no method that a class may forbid."""
    if holds(holder, content):
        return
    base: Any = next(each for each in (OrderedDict, dict, list, set, deque) if isinstance(holder, each))
    base.clear(holder)
    if isinstance(content, dict):
        for key, value in content.items():
            base.__setitem__(holder, key, value)
    elif isinstance(holder, set):
        set.update(holder, content)
    else:
        base.extend(holder, content)


def _items(holder: Any) -> Iterable[Any]:
    return chain(holder, holder.values()) if isinstance(holder, dict) else holder


def _keep_optimizer(restoring: Restoring, optimizer: torch.optim.Optimizer, names: _Names) -> None:
    """Keep attributes, states and groups. Attributes come first when all is restored: they hold the others."""
    for group in optimizer.param_groups:
        _keep_content(restoring, "a parameter group of the optimizer", group)
    _keep_content(restoring, "the parameter groups of the optimizer", optimizer.param_groups)
    for parameter, state in optimizer.state.items():
        what = f"the optimizer's state of {names[parameter]}"
        restoring.add(what, _restore_state, optimizer, parameter, dict(state))
    restoring.add("the optimizer's states", _drop_states, optimizer, set(optimizer.state))
    _keep_content(restoring, "the optimizer's attributes", optimizer.__dict__)


def _restore_state(optimizer: torch.optim.Optimizer, parameter: Tensor, state: dict[str, Any]) -> None:
    held = optimizer.state[parameter]
    held.clear()
    held.update(state)


def _drop_states(optimizer: torch.optim.Optimizer, known: set[Tensor]) -> None:
    """Drop the states that the step made."""
    for parameter in list(optimizer.state):
        if parameter not in known:
            del optimizer.state[parameter]


def _keep_generators(restoring: Restoring) -> None:
    restoring.add("torch's generator", torch.set_rng_state, torch.get_rng_state())
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        restoring.add("CUDA's generators", torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all())
    restoring.add("Python's generator", random.setstate, random.getstate())
    restoring.add("numpy's generator", np.random.set_state, np.random.get_state())
