"""State of a step between steps: modules, parameters, tensors in modules' attributes, optimizer state."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import suppress
from functools import partial
from types import CellType, FunctionType, MemberDescriptorType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakIdKeyDictionary

from lowtide.compat.modules import own_attributes, own_buffers, own_parameters
from lowtide.tracing.dense_parts import address, parts
from lowtide.tracing.meter import pooled_bytes, rounded, tensor_bytes
from lowtide.workload import Workload

CONTAINERS = (list, tuple, dict, deque, set, frozenset)
_LONGEST = 1000  # entries of a container that is opened; a longer one is data


def modules_of(work: Workload) -> list[nn.Module]:
    """List the modules of the model, and of what the loss function names."""
    named = (each for each in walk(named_by(work.loss)) if is_a(each, nn.Module))
    return list(dict.fromkeys(module for top in (work.model, *named) for module in top.modules()))


def named_by(loss: Any) -> list[Any]:
    """List what a loss names: its object and that object's attributes, its arguments, closure and globals."""
    return [each for part in walk([loss], _parts) for each in _names(part)]


def _parts(called: Any) -> Iterator[Any]:
    """Yield what runs where an object is called."""
    if is_a(called, partial):
        yield called.func
    elif is_a(called, MethodType):
        yield from (called.__self__, called.__func__)
    elif not is_a(called, FunctionType):
        functions = (getattr(type(called), name, None) for name in ("__call__", "forward"))
        yield from (function for function in functions if is_a(function, FunctionType))
    if (wrapped := _attributes(called).get("__wrapped__")) is not None:
        yield wrapped


def _names(part: Any) -> Iterator[Any]:
    """Yield the arguments, closure and globals of a function, or an object and its attributes."""
    if is_a(part, FunctionType):
        yield from (*(part.__defaults__ or ()), *(part.__kwdefaults__ or {}).values(), *vars(part).values())
        yield from (cell.cell_contents for cell in part.__closure__ or () if cell != CellType())
        yield from (part.__globals__.get(name) for name in part.__code__.co_names)
    else:
        yield from (part, *_attributes(part).values())


def _attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, in slots too, without asking the object."""
    attributes = dict[str, Any]()
    for name, slot in (each for kind in type(value).__mro__ for each in vars(kind).items()):
        if is_a(slot, MemberDescriptorType) and not name.startswith("__"):  # those are the interpreter's
            with suppress(AttributeError):  # an empty one
                attributes[name] = slot.__get__(value)
    with suppress(AttributeError):
        attributes |= object.__getattribute__(value, "__dict__")
    return attributes


def contents(value: Any) -> Iterable[Any]:
    """Return the entries of a list, tuple, dictionary, deque or set; none of anything else, or of a long one."""
    if not is_a(value, CONTAINERS) or len(value) > _LONGEST:
        return ()
    return value.values() if is_a(value, dict) else value


def walk(values: Iterable[Any], inside: Callable[[Any], Iterable[Any]] = contents) -> Iterator[Any]:
    """Yield values, and those ``inside`` them at any depth: in containers, unless another function says more."""
    waiting, opened = list(values), set[int]()
    for value in waiting:  # it grows meanwhile
        yield value
        if id(value) not in opened:
            opened.add(id(value))
            waiting += inside(value)


def is_a(value: Any, kinds: Any) -> bool:
    """Check a value's class without asking the value: a proxy of a dead object would raise."""
    return issubclass(type(value), kinds)


def held_tensors(work: Workload) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in modules' attributes and in containers there, buffers included, each once with a name."""
    seen: set[int] = set()
    for module in modules_of(work):
        for name, value in (*own_buffers(module).items(), *own_attributes(module).items()):
            for each in walk([value]):
                if is_a(each, Tensor) and id(each) not in seen:
                    seen.add(id(each))
                    yield f"{type(module).__name__}.{name}", each


def watch_modules(work: Workload) -> Callable[[], list[tuple[str, Tensor]]]:
    """Return a function that lists tensors which modules' attributes hold since. It keeps no tensor alive.

    Storages of parameters and of the batch are left out.
    """
    before: MutableMapping[Tensor, None] = WeakIdKeyDictionary({tensor: None for _, tensor in held_tensors(work)})
    known = {address(tensor) for tensor in (*parameters_of(work), *work.tensors())} - {0}

    def since() -> list[tuple[str, Tensor]]:
        return [(name, t) for name, t in held_tensors(work) if t not in before and address(t) not in known]

    return since


def parameters_of(work: Workload) -> list[Tensor]:
    """List the parameters of the modules and of the optimizer."""
    parameters = [p for module in modules_of(work) for p in own_parameters(module).values() if p is not None]
    if work.optimizer is not None:
        parameters += (p for group in work.optimizer.param_groups for p in group["params"])
    return list(dict.fromkeys(parameters))


def trainable(work: Workload) -> list[Tensor]:
    """List all tensors that may get a gradient."""
    others = (*work.tensors(), *(tensor for _, tensor in held_tensors(work)))
    return list(dict.fromkeys((*parameters_of(work), *(t for t in others if t.is_leaf and t.requires_grad))))


def clear_gradients(work: Workload) -> None:
    """Free the gradients of parameters, of the batch and of tensors that modules hold."""
    for tensor in trainable(work):
        tensor.grad = None


def optimizers_of(optimizer: torch.optim.Optimizer | None) -> list[torch.optim.Optimizer]:
    """List an optimizer and the optimizers inside it, as Lookahead has one."""
    if optimizer is None:
        return []
    inner = [value for value in vars(optimizer).values() if isinstance(value, torch.optim.Optimizer)]
    return [optimizer, *(each for one in inner for each in optimizers_of(one))]


def state_tensors(optimizer: torch.optim.Optimizer | None, parameters: list[Tensor] | None = None) -> list[Tensor]:
    """List the tensors of an optimizer's state, for some parameters or for all."""
    if optimizer is None:
        return []
    chosen = list(optimizer.state) if parameters is None else parameters
    return [value for p in chosen for value in optimizer.state[p].values() if isinstance(value, Tensor)]


def own_storages(work: Workload, *, gradients: bool = True) -> list[torch.UntypedStorage]:
    """List storages on the step's device: of parameters, tensors of modules, optimizer state, batch and gradients."""
    owned = [*parameters_of(work), *(tensor for _, tensor in held_tensors(work)), *work.tensors()]
    owned += state_tensors(work.optimizer)
    if gradients:
        owned += [tensor.grad for tensor in trainable(work) if tensor.grad is not None]
    dense = (part for tensor in owned for part in parts(tensor) if part.device.type == work.device.type)
    return [part.untyped_storage() for part in dense]


def static_bytes(work: Workload) -> int:
    """Count the bytes that a step finds and leaves, each storage once, without gradients."""
    return sum(_sizes(own_storages(work, gradients=False)))


class UnusedStorages:
    """Storages of a step that a change of it leaves alive and does not use. Inside of ``unchanged`` there may be some.

    Such are optimizer states that the changed step has on the host. Storages are not held here.
    """

    def __init__(self, work: Workload) -> None:
        storages = {storage.data_ptr(): storage for storage in own_storages(work, gradients=False)}
        self._sizes = [(StorageWeakRef(each), each.nbytes()) for address, each in storages.items() if address]

    def bytes_beside(self, changed: Workload) -> int:
        """Count their bytes as the allocator of a GPU does."""
        used = {StorageWeakRef(storage).cdata for storage in own_storages(changed, gradients=False)}
        alive = ((each.cdata, size) for each, size in self._sizes if not each.expired())
        return sum(rounded(size) for cdata, size in alive if cdata not in used)


def other_bytes(work: Workload, *, gradients: bool = True) -> int:
    """Count the bytes of other tensors of the process on the step's GPU. 0 on a CPU, whose peaks never count them.

    ``gradients`` says whether those that exist are the step's. A step inside of ``unchanged`` makes its own.
    """
    if work.device.type != "cuda":
        return 0
    own = _sizes(own_storages(work, gradients=gradients))
    if pooled_bytes(work.device):
        torch.cuda.empty_cache()  # pools of graphs that are gone would count, and be free when the step runs
    return max(0, tensor_bytes(work.device) + pooled_bytes(work.device) - sum(map(rounded, own)))


def _sizes(storages: Iterable[torch.UntypedStorage]) -> Iterable[int]:
    """The bytes of each storage, each once."""
    return {address: storage.nbytes() for storage in storages if (address := storage.data_ptr())}.values()
