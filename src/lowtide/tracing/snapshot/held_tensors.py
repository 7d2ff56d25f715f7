"""What a step holds: its modules, those of the loss, their parameters, and tensors kept beside them."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterator, MutableMapping
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any
from weakref import ProxyTypes

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from lowtide.compat.modules import own_attributes, own_parameters
from lowtide.tracing.dense_parts import address, parts
from lowtide.workload import Workload

_DEPTH = 3  # how many functions and objects behind one another are looked into
_LARGE = 1000  # a longer list is data
_LEAVES = (type, ModuleType, str, bytes, int, float, complex, type(None))
_CHANGEABLE = (dict, list, set, deque)
_Seen = dict[
    int, tuple[int, Any]
]  # by identity: from how near, and the thing itself, so that no identity is used twice


def modules_of(work: Workload) -> list[nn.Module]:
    """The modules of the model, and of what the loss function holds."""
    tops = [work.model, *_modules_held_by(work.loss)]
    return list(dict.fromkeys(module for top in tops for module in top.modules()))


def _modules_held_by(loss: Any) -> list[nn.Module]:
    """Modules that a function may call: of its object, its arguments and variables, the globals that it names."""
    found, _ = _reach([inspect.unwrap(loss)], _DEPTH, {})
    return [each for each in found if isinstance(each, nn.Module)]


def kept_tensors(work: Workload, depth: int = _DEPTH) -> Iterator[tuple[str, Tensor]]:
    """The tensors that modules hold beside parameters, each with a name.

    Buffers and attributes, also in containers, and, with a depth above 1, what objects and hooks hold.
    """
    seen: _Seen = {}
    for module in modules_of(work):
        for name, value in own_attributes(module).items():
            found, _ = _reach([value], depth, seen)
            yield from ((f"{type(module).__name__}.{name}", each) for each in found if isinstance(each, Tensor))


def tensors_of(work: Workload) -> list[Tensor]:
    """All that a step holds between steps: parameters, kept tensors, optimizer states, batch, what the loss holds."""
    found, _ = _reach([inspect.unwrap(work.loss)], _DEPTH, {})
    kept = [tensor for _, tensor in kept_tensors(work)] + [each for each in found if isinstance(each, Tensor)]
    return [*parameters_of(work), *kept, *state_tensors(work.optimizer), *work.tensors()]


def holders(work: Workload) -> list[Any]:
    """What modules hold that can come to hold other things: containers and objects, these by their attributes."""
    seen: _Seen = {}
    found: dict[int, Any] = {}
    for module in modules_of(work):
        _, holding = _reach(list(module.__dict__.values()), _DEPTH, seen)
        found.update((id(each), each) for each in holding)
    return list(found.values())


def holders_within(values: list[Any], depth: int) -> list[Any]:
    """Containers and objects' attributes within reach of some values, which may come to hold other things."""
    _, holding = _reach(list(values), depth, {})
    return holding


def _reach(within: list[Any], depth: int, seen: _Seen) -> tuple[list[Any], list[Any]]:
    """The tensors and modules within reach, and what holds them or may come to.

    Looked into are containers, functions, objects, and what those hold in turn; no further than ``depth``, or all of
    the program would be within reach, and nothing of torch's own. What was ``seen`` from as near is passed over.
    """
    found: list[Any] = []
    holding: list[Any] = []
    for left in range(depth, 0, -1):
        deeper: list[Any] = []
        for value in within:  # it grows while it is gone through
            if type(value) in ProxyTypes or isinstance(value, _LEAVES):
                continue  # a proxy of what is gone cannot be asked anything
            nearest, _ = seen.get(id(value), (0, None))
            if nearest >= left:
                continue
            seen[id(value)] = left, value
            if isinstance(value, (Tensor, nn.Module)):
                found += [] if nearest else [value]
            elif isinstance(value, (tuple, *_CHANGEABLE)):
                holding += [value] if isinstance(value, _CHANGEABLE) else []
                if len(value) <= _LARGE:
                    within += value.values() if isinstance(value, dict) else value
            elif isinstance(value, MethodType):
                within += (value.__self__, value.__func__)
            elif isinstance(value, partial):
                within += (value.func, *value.args, *value.keywords.values())
            elif _is_of_torch(value):
                continue
            elif isinstance(value, FunctionType):
                deeper += _variables(value)
            else:
                own = _attributes(value)
                deeper += (*((type(value).__call__,) if callable(value) else ()), *list(own.values()))
                holding += [own] if left > 1 else []
        within = deeper
    return found, holding


def _attributes(value: Any) -> dict[str, Any]:
    """Those of an object, whatever it does when it is asked for one."""
    try:
        found = object.__getattribute__(value, "__dict__")
    except Exception:  # it has none
        return {}
    return found if type(found) is dict else {}


def _is_of_torch(value: Any) -> bool:
    made = value if isinstance(value, FunctionType) else type(value)
    return (made.__module__ or "").partition(".")[0] == "torch"


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


def watch_modules(work: Workload) -> Callable[[], list[tuple[str, Tensor]]]:
    """A function that lists what modules have come to hold since, but for parameters' and the batch's storages.

    It keeps nothing alive.
    """
    before: MutableMapping[Tensor, None] = WeakIdKeyDictionary({tensor: None for _, tensor in kept_tensors(work)})
    there = {address(tensor) for tensor in (*parameters_of(work), *work.tensors())} - {0}

    def since() -> list[tuple[str, Tensor]]:
        found = kept_tensors(work)
        return [(name, each) for name, each in found if each not in before and address(each) not in there]

    return since


def parameters_of(work: Workload) -> list[Tensor]:
    """The parameters of those modules and of the optimizer."""
    found: dict[Tensor, None] = {}
    for module in modules_of(work):
        found.update(dict.fromkeys(p for p in own_parameters(module).values() if p is not None))
    if work.optimizer is not None:
        found.update(dict.fromkeys(p for group in work.optimizer.param_groups for p in group["params"]))
    return list(found)


def state_tensors(optimizer: torch.optim.Optimizer | None, parameters: list[Tensor] | None = None) -> list[Tensor]:
    """The tensors of an optimizer's state: of some parameters, or of all."""
    if optimizer is None:
        return []
    chosen = list(optimizer.state) if parameters is None else parameters
    return [value for p in chosen for value in optimizer.state[p].values() if isinstance(value, Tensor)]


def static_bytes(work: Workload) -> int:
    """The bytes that a step finds and leaves: parameters, buffers, kept tensors, optimizer state and the batch."""
    kept = (tensor for _, tensor in kept_tensors(work, depth=1))
    found = (*parameters_of(work), *kept, *state_tensors(work.optimizer), *work.tensors())
    storages = [part.untyped_storage() for tensor in found for part in parts(tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def optimizers_of(optimizer: torch.optim.Optimizer | None) -> list[torch.optim.Optimizer]:
    """An optimizer and those inside of it, which it steps with, as Lookahead does."""
    if optimizer is None:
        return []
    inner = [value for value in vars(optimizer).values() if isinstance(value, torch.optim.Optimizer)]
    return [optimizer, *(each for one in inner for each in optimizers_of(one))]


def clear_gradients(work: Workload) -> None:
    """Let go of the gradients of parameters, of the batch and of what modules hold."""
    for tensor in trainable(work):
        tensor.grad = None


def trainable(work: Workload) -> list[Tensor]:
    """All that may come to have a gradient."""
    others = (*work.tensors(), *(tensor for _, tensor in kept_tensors(work)))
    return list(dict.fromkeys((*parameters_of(work), *(t for t in others if t.is_leaf and t.requires_grad))))
