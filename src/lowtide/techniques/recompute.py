"""Run a function, drop what it saved, and run it again when the backward pass asks, in the same state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.nn.modules.batchnorm import _NormBase
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from lowtide.errors import LowtideError


@_disable_dynamo  # checkpoint's contexts cannot be compiled: a compiled model runs these parts eagerly
def recompute(
    function: Callable[..., Any], *args: Any, modules: Sequence[nn.Module], path: str = "", **kwargs: Any
) -> Any:
    """``function(*args, **kwargs)``, keeping only its inputs for the backward pass: bitwise, and it nests.

    A non-reentrant ``torch.utils.checkpoint`` that also leaves the modules' state alone. The second run draws
    the same random numbers, is under the same autocast, finds every module in the same ``training`` mode and
    every buffer as the first run found it; it updates no running statistics. State that is in neither buffers
    nor generators (a Python counter, a file) is beyond it.

    ``modules`` are those that the function runs, ``path`` is where it is, for errors.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    leaves, structure = pytree.tree_flatten((args, kwargs))
    # Tensors go to checkpoint one by one: what sits in a tuple or a keyword would stay alive in an outer
    # checkpoint.
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    tensors: list[Tensor] = [leaves[i] for i in places]
    others = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    versions = [tensor._version for tensor in tensors]

    def run(*inputs: Tensor) -> Any:
        values = list(others)
        for place, tensor in zip(places, inputs, strict=True):
            values[place] = tensor
        arguments, keywords = pytree.tree_unflatten(values, structure)
        return function(*arguments, **keywords)

    state = _State(list(dict.fromkeys(module for top in modules for module in top.modules())))
    result = checkpoint(run, *tensors, use_reentrant=False, context_fn=lambda: (_First(state), _Again(state)))
    if versions != [tensor._version for tensor in tensors]:
        raise LowtideError(
            "A recomputed part writes into its own input, which is then no longer there to start again from",
            where=path,
            hint="Start the part one module earlier, or set inplace=False in its first module.",
        )
    return result


@dataclass
class _State:
    """What the first run found: the modules' modes, and the buffers that it went on to change."""

    modules: list[nn.Module]
    training: list[bool] = field(default_factory=list[bool])
    buffers: list[tuple[nn.Module, str, Tensor]] = field(default_factory=list[tuple[nn.Module, str, Tensor]])


class _First:
    """The first run: remember the modes, and the buffers that it changes."""

    def __init__(self, state: _State) -> None:
        self.state = state
        self.before: list[tuple[nn.Module, str, Tensor, int, Tensor]] = []

    def __enter__(self) -> None:
        self.state.training = [module.training for module in self.state.modules]
        self.before = [
            (module, name, buffer, buffer._version, buffer.clone())
            for module in self.state.modules
            if not isinstance(module, _NormBase)  # what they do with their statistics is known
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    def __exit__(self, *exception: object) -> None:
        self.state.buffers = [
            (module, name, was)
            for module, name, buffer, version, was in self.before
            if module._buffers.get(name) is not buffer or buffer._version != version
        ]
        self.before = []


class _Again:
    """A later run: modes and buffers as the first run found them, on copies."""

    def __init__(self, state: _State) -> None:
        self.state = state
        self.modes: list[tuple[nn.Module, bool]] = []
        self.replaced: list[tuple[nn.Module, str, Tensor | None]] = []

    def __enter__(self) -> None:
        state = self.state
        copies = [(module, name, was.clone()) for module, name, was in state.buffers]
        for module, training in zip(state.modules, state.training, strict=True):
            if module.training != training:
                self.modes.append((module, module.training))
                module.training = training
            # Normalising by the batch reads no statistics, so any copy will do; autograd saves them, so None
            # would not.
            if training and isinstance(module, _NormBase):
                copies += [(module, name, b.clone()) for name, b in module._buffers.items() if b is not None]
        for module, name, copy in copies:
            self.replaced.append((module, name, module._buffers[name]))
            module._buffers[name] = copy

    def __exit__(self, *exception: object) -> None:
        for module, training in self.modes:
            module.training = training
        for module, name, buffer in self.replaced:
            module._buffers[name] = buffer
        self.modes, self.replaced = [], []
