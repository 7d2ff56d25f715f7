"""Run a function, free its saved values, and run it again in backward from the same state."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lowtide.compat import pytree
from lowtide.compat.autograd import gradient_hooks
from lowtide.compat.dynamo import disable_dynamo
from lowtide.compat.modules import NormBase, own_buffers, own_parameters
from lowtide.compat.tensors import version_of
from lowtide.errors import LowtideError, ModifiedError
from lowtide.nn.renorm import RESTORED, _BatchRenormAct
from lowtide.tracing.snapshot import content_of, has_content, restore_content
from lowtide.tracing.step_state import is_a, walk

_DEPTH = 4  # of objects in one another that an argument is made of, such as a cache of keys and values
_NO_STATE = (Tensor, nn.Module, type, ModuleType, FunctionType, MethodType, tuple, str, bytes, int, float, type(None))
_Content = tuple[Any, dict[Any, Any] | list[Any]]  # a container, and what it held
_Versioned = tuple[nn.Module, str, Tensor, int]  # a parameter, with its module and name


@disable_dynamo  # checkpoint's contexts cannot be compiled: a compiled model runs these parts eagerly
def recompute(
    function: Callable[..., Any], *args: Any, modules: Sequence[nn.Module], path: str = "", **kwargs: Any
) -> Any:
    """``function(*args, **kwargs)``, keeping only its inputs for the backward pass: bitwise, and it nests.

    A non-reentrant ``torch.utils.checkpoint`` that also leaves the modules' state alone. The second run has the random
    numbers, autocast, ``training`` modes, buffers and caches among the arguments that the first run had. It updates no
    running statistics. A parameter that was changed in between raises, unless it is stepped in backward. Other state is
    not restored: a ``torch.Generator`` of the model's, Python's and numpy's generators, counters, files.

    ``modules`` are those that the function runs; ``path`` is its place, for errors.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    leaves, structure = pytree.tree_flatten((args, kwargs))
    # Tensors go to checkpoint one by one: what sits in a tuple or a keyword would stay alive in an outer
    # checkpoint.
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    tensors: list[Tensor] = [leaves[i] for i in places]
    others = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    versions = [version_of(tensor) for tensor in tensors]

    def run(*inputs: Tensor) -> Any:
        values = list(others)
        for place, tensor in zip(places, inputs, strict=True):
            values[place] = tensor
        arguments, keywords = pytree.tree_unflatten(values, structure)
        return function(*arguments, **keywords)

    inside = list(dict.fromkeys(module for top in modules for module in top.modules()))
    state = _State(inside, path, _holders_among(others))
    result = checkpoint(
        run,
        *tensors,
        use_reentrant=False,
        context_fn=lambda: (_first_run(state), _LaterRun(state)),
        # A checkpoint stops once it has all saved tensors, and this layer saves its noise before it is drawn.
        early_stop=not any(isinstance(module, nn.RReLU) for module in state.modules),
    )
    if versions != [version_of(tensor) for tensor in tensors]:
        raise LowtideError(
            "A recomputed part writes into its own input, which is then no longer there to start again from",
            where=path,
            hint="Start the part one module earlier, or set inplace=False in its first module.",
        )
    return result


@dataclass
class _State:
    """State before the first run: modes, buffers and contents that it changes, versions of parameters."""

    modules: list[nn.Module]
    path: str
    holders: list[Any]  # containers, and attributes of objects, among the arguments
    contents: list[_Content] = field(default_factory=list[_Content])
    training: list[bool] = field(default_factory=list[bool])
    buffers: list[tuple[nn.Module, str, Tensor]] = field(default_factory=list[tuple[nn.Module, str, Tensor]])
    parameters: list[_Versioned] = field(default_factory=list[_Versioned])


@contextmanager
def _first_run(state: _State) -> Generator[None]:
    """Note the modes, and the buffers that the first run changes."""
    state.contents = [(holder, content_of(holder)) for holder in state.holders]
    state.training = [module.training for module in state.modules]
    before = [
        (module, name, buffer, version_of(buffer), buffer.clone())
        for module in state.modules
        if not _ignores_statistics(module)
        for name, buffer in own_buffers(module).items()
        if buffer is not None
    ]
    # An optimizer that steps in backward may act before this; ops behind its parameter are then differentiated.
    state.parameters = [
        (module, name, parameter, version_of(parameter))
        for module in state.modules
        for name, parameter in own_parameters(module).items()
        if parameter is not None and not parameter.is_inference() and not gradient_hooks(parameter)
    ]
    try:
        yield
    finally:
        state.contents = [held for held in state.contents if not has_content(*held)]
        state.holders = []
        state.buffers = [
            (module, name, was)
            for module, name, buffer, version, was in before
            if own_buffers(module).get(name) is not buffer
            or version_of(buffer) != version
            or isinstance(module, NormBase)  # kernels write statistics without counting versions
        ]
        # A module that writes into its own weights, as an embedding with max_norm, will do so again.
        state.parameters = [held for held in state.parameters if version_of(held[2]) == held[3]]


class _LaterRun:
    """A later run: modes and buffers as the first run found them, on copies."""

    def __init__(self, state: _State) -> None:
        self.state = state
        self.modes: list[tuple[nn.Module, bool]] = []
        self.replaced: list[tuple[nn.Module, str, Tensor | None]] = []
        self.contents: list[_Content] = []

    def __enter__(self) -> None:
        state = self.state
        for module, name, parameter, version in state.parameters:
            if version_of(parameter) != version:
                raise _modified(module, name, parameter, version, state.path)
        copies = [(module, name, was.clone()) for module, name, was in state.buffers]
        for _, _, copy in copies:
            setattr(copy, RESTORED, True)
        for module, training in zip(state.modules, state.training, strict=True):
            if module.training != training:
                self.modes.append((module, module.training))
                module.training = training
            # Normalising by the batch reads no statistics, so any copy will do; autograd saves them, so None
            # would not.
            if training and _ignores_statistics(module):
                copies += [(module, name, b.clone()) for name, b in own_buffers(module).items() if b is not None]
        for holder, content in state.contents:
            self.contents.append((holder, content_of(holder)))
            restore_content(holder, content)
        for module, name, copy in copies:
            self.replaced.append((module, name, own_buffers(module)[name]))
            own_buffers(module)[name] = copy

    def __exit__(self, *exception: object) -> None:
        for module, training in self.modes:
            module.training = training
        for module, name, buffer in self.replaced:
            own_buffers(module)[name] = buffer
        for holder, content in self.contents:
            restore_content(holder, content)
        self.modes, self.replaced, self.contents = [], [], []


def _holders_among(arguments: Iterable[Any]) -> list[Any]:
    """List containers, and attributes of objects, that a run may change among its arguments."""
    holders: dict[int, Any] = {}
    for _ in range(_DEPTH):
        inside: list[Any] = []
        for value in walk(arguments):
            if is_a(value, (dict, list, set, deque)):
                holders[id(value)] = value
            elif not is_a(value, _NO_STATE) and type(value).__module__.partition(".")[0] != "torch":
                attributes = _attributes(value)
                if attributes is not None and id(attributes) not in holders:
                    holders[id(attributes)] = attributes
                    inside += attributes.values()
        arguments = inside
    return list(holders.values())


def _attributes(value: Any) -> dict[str, Any] | None:
    """Read ``__dict__``, bypassing ``__getattribute__`` overrides."""
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except Exception:  # it has none
        return None
    return attributes if type(attributes) is dict else None


def _ignores_statistics(module: nn.Module) -> bool:
    """Tell whether a module normalises by its batch in training, so that nothing depends on its running statistics."""
    return isinstance(module, NormBase) and not isinstance(module, _BatchRenormAct)


def _modified(module: nn.Module, name: str, parameter: Tensor, version: int, path: str) -> ModifiedError:
    return ModifiedError(
        f"{type(module).__name__}.{name} {list(parameter.shape)} was changed between the forward and the backward pass "
        "of a recomputed part, which would run again with other weights. It is at "
        f"version {version_of(parameter)}; expected version {version} instead",
        where=path,
        hint="Call backward() before the optimizer's step, or whatever else writes into the parameters.",
    )
