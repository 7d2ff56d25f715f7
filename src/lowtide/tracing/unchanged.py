"""The promise that a trace changes nothing: values, gradients, buffers, optimizer state, generators."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Generator, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from lowtide.tracing.internals import autograd, gradient_hooks
from lowtide.workload import Workload

_DEPTH = 3  # how many functions and objects behind one another are looked into for modules
_LARGE = 1000  # a longer list is data
_LEAVES = (type, ModuleType, Tensor, str, bytes, int, float, complex, type(None))


@contextmanager
def unchanged(work: Workload, *, fake: bool = False) -> Generator[None]:
    """Put the model, its gradients and buffers, the optimizer and the generators back as they were.

    Modules that the loss holds, such as a criterion, count as the model's, whether they are its own or its object's, in
    its closure, bound to it or global. A fake step cannot change values, so
    nothing is copied for it. What is neither in them nor in the batch (a generator of the user's own, a file) is
    beyond it.
    """
    with ExitStack() as stack:
        stack.callback(_restore_generators, _generators())
        modules = modules_of(work)
        for module in modules:
            stack.callback(_restore_attributes, module, dict(module.__dict__), _containers(module))
        parameters = parameters_of(work)
        leaves = [*parameters, *(t for t in work.tensors() if t.is_leaf)]
        stack.callback(_restore_gradients, leaves, [leaf.grad for leaf in leaves])
        for leaf in leaves:
            leaf.grad = None
        for store in _stores(parameters):
            stack.callback(store.set_aside())
        if work.optimizer is not None:
            stack.callback(_restore_optimizer, work.optimizer, *_optimizer_snapshot(work.optimizer))
        if not fake:
            buffers = dict.fromkeys(b for module in modules for b in module._buffers.values() if b is not None)
            inputs = [t for t in work.tensors() if not t.is_inference()]  # those cannot be written to
            trained = [*parameters, *state_tensors(work.optimizer)]
            backups = [_Backup(b, counts=False) for b in buffers]
            backups += [_Backup(t, counts=False) for t in trained]
            backups += [_Backup(t) for t in inputs]
            stack.callback(_restore_values, backups)
        yield


@contextmanager
def steady(work: Workload) -> Generator[None]:
    """The model as a step leaves it, if that makes other tensors for it to keep; afterwards it is as it was."""
    with ExitStack() as stack:
        stack.enter_context(unchanged(work))
        is_steady = watch_modules(work)
        work.compute_loss().backward()
        if is_steady():
            stack.close()
        else:
            clear_gradients(work)
        yield


def clear_gradients(work: Workload) -> None:
    """Let go of the gradients of parameters and of the batch."""
    for tensor in (*parameters_of(work), *(t for t in work.tensors() if t.is_leaf)):
        tensor.grad = None


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


def modules_of(work: Workload) -> list[nn.Module]:
    """The modules of the model, and of what the loss function holds."""
    tops = [work.model, *_modules_held_by(work.loss)]
    return list(dict.fromkeys(module for top in tops for module in top.modules()))


def _modules_held_by(loss: Any) -> list[nn.Module]:
    """Modules that a function may call: of its object, its arguments and variables, the globals that it names.

    Looked into are the function, what it holds, and what that holds in turn; no further, or all of the program would
    be within reach.
    """
    found: list[nn.Module] = []
    seen: dict[int, Any] = {}  # by identity, and held: no identity is used twice
    within = [inspect.unwrap(loss)]
    for _ in range(_DEPTH):
        deeper: list[Any] = []
        for value in within:  # it grows while it is gone through
            if id(value) in seen or isinstance(value, _LEAVES):
                continue
            seen[id(value)] = value
            if isinstance(value, nn.Module):
                found.append(value)
            elif isinstance(value, (dict, list, tuple, set)):
                if len(value) <= _LARGE:
                    within += value.values() if isinstance(value, dict) else value
            elif isinstance(value, MethodType):
                within += (value.__self__, value.__func__)
            elif isinstance(value, partial):
                within += (value.func, *value.args, *value.keywords.values())
            elif isinstance(value, FunctionType):
                deeper += _variables(value)
            else:
                deeper += (type(value).__call__,) if callable(value) else ()
                deeper += getattr(value, "__dict__", {}).values()
        within = deeper
    return found


def _variables(function: FunctionType) -> list[Any]:
    """What a function has from elsewhere."""
    code, named = function.__code__, function.__globals__
    held = [cell.cell_contents for cell in function.__closure__ or () if _is_set(cell)]
    held += (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    return held + [named[name] for name in code.co_names if name in named]


def _is_set(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - a cell whose variable is not assigned yet has none
    except ValueError:
        return False
    return True


def held_by_modules(work: Workload) -> Iterator[tuple[str, Tensor]]:
    """The tensors that modules hold beside parameters, each with a name: buffers, attributes, also in containers."""
    for module in modules_of(work):
        for name, value in module.__dict__.items():
            held = value if isinstance(value, (dict, list, tuple, set)) and len(value) <= _LARGE else (value,)
            for each in held.values() if isinstance(held, dict) else held:
                if isinstance(each, Tensor) and value is not module._parameters:
                    yield f"{type(module).__name__}.{name}", each


def watch_modules(work: Workload) -> Callable[[], bool]:
    """A function that says whether modules hold no other tensors than now. It keeps none alive."""
    now: MutableMapping[Tensor, None] = WeakIdKeyDictionary({tensor: None for _, tensor in held_by_modules(work)})
    return lambda: all(tensor in now for _, tensor in held_by_modules(work))


def parameters_of(work: Workload) -> list[Tensor]:
    """The parameters of those modules and of the optimizer."""
    found: dict[Tensor, None] = {}
    for module in modules_of(work):
        found.update(dict.fromkeys(p for p in module._parameters.values() if p is not None))
    if work.optimizer is not None:
        found.update(dict.fromkeys(p for group in work.optimizer.param_groups for p in group["params"]))
    return list(found)


def state_tensors(optimizer: torch.optim.Optimizer | None, parameters: list[Tensor] | None = None) -> list[Tensor]:
    """The tensors of an optimizer's state: of some parameters, or of all."""
    if optimizer is None:
        return []
    chosen = list(optimizer.state) if parameters is None else parameters
    return [value for p in chosen for value in optimizer.state[p].values() if isinstance(value, Tensor)]


def _stores(parameters: list[Tensor]) -> set[Any]:
    """What keeps gradients elsewhere than in ``.grad`` until the step."""
    hooks = (hook for parameter in parameters for hook in gradient_hooks(parameter).values())
    return {hook for hook in hooks if hasattr(hook, "set_aside")}


def _restore_gradients(parameters: list[Tensor], gradients: list[Tensor | None]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


def _containers(module: nn.Module) -> list[tuple[Any, Any]]:
    """The containers that a module holds, parameters and buffers among them, each with a copy."""
    return [(held, held.copy()) for held in module.__dict__.values() if isinstance(held, (dict, list, set))]


def _restore_attributes(module: nn.Module, attributes: dict[str, Any], containers: list[tuple[Any, Any]]) -> None:
    """Take back what the forward pass set on a module, such as a cache of fake tensors."""
    module.__dict__.clear()
    module.__dict__.update(attributes)
    for held, content in containers:
        if isinstance(held, list):
            held[:] = content
        else:
            held.clear()
            held.update(content)


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
