"""One forward as a graph, by ``torch.fx`` with the module's children as leaves; what cannot be one is refused."""

from __future__ import annotations

import inspect
import itertools
import operator
import random
import traceback
import warnings
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, fx, nn

from lowtide.compat import pytree
from lowtide.compat.autograd import top_saved_hooks
from lowtide.compat.dispatch import TorchDispatchMode
from lowtide.compat.frames import frame_at
from lowtide.tracing.snapshot import content_of, has_content, restore_content


class Untraceable(Exception):
    """A forward that cannot be written as a graph, with the line that is why."""


class _Slot(Enum):
    """Kind of a leaf of the arguments that is no setting."""

    TENSOR = "tensor"
    OTHER = "other"


SETTINGS = frozenset((bool, int, float, str, type(None), torch.dtype, torch.device))


@dataclass(frozen=True, slots=True)
class ForwardCall:
    """Arguments of a forward's call, with tensors left open."""

    structure: pytree.TreeSpec
    leaves: tuple[_Slot | tuple[type, Any], ...]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ForwardCall:
        """Read a call from its description."""
        leaves, structure = pytree.tree_flatten((args, kwargs))
        return cls(structure, tuple([leaf if isinstance(leaf, _Slot) else (type(leaf), leaf) for leaf in leaves]))

    @classmethod
    def tensors(cls, count: int) -> ForwardCall:
        """A call with this many tensors and nothing else."""
        _, structure = pytree.tree_flatten(((None,) * count, {}))
        return cls(structure, (_Slot.TENSOR,) * count)

    @classmethod
    def guesses(cls, module: nn.Module) -> Generator[ForwardCall]:
        """Calls that a forward's signature allows: with tensors, or with lists of them."""
        choices: list[list[tuple[Any, ...]]] = []
        keywords: dict[str, Any] = {}
        one = _Slot.TENSOR
        for parameter in parameters_of(module):
            if parameter.kind is parameter.VAR_POSITIONAL:
                choices.append([(one,), (one, one)])
            elif parameter.default is parameter.empty and parameter.kind is parameter.KEYWORD_ONLY:
                keywords[parameter.name] = one
            elif parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD:
                choices.append([(one,), ([one, one],)])
        for choice in itertools.islice(itertools.product(*choices), 8):
            leaves, structure = pytree.tree_flatten((tuple(itertools.chain(*choice)), keywords))
            yield cls(structure, tuple(leaves))


def describe(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Sequence[Any]]:
    """The arguments with tensors and unknown objects left open, as Python constants; and the values left open."""
    leaves, structure = pytree.tree_flatten((args, kwargs))
    slots = [
        _Slot.TENSOR if isinstance(leaf, Tensor) else leaf if type(leaf) in SETTINGS else _Slot.OTHER for leaf in leaves
    ]
    values = [leaf for leaf, slot in zip(leaves, slots, strict=True) if isinstance(slot, _Slot)]
    return pytree.tree_unflatten(slots, structure), values


def is_torchs(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.")


def parameters_of(module: nn.Module) -> list[inspect.Parameter]:
    """Parameters of a forward besides ``self``."""
    try:
        parameters = list(inspect.signature(type(module).forward).parameters.values())
    except (TypeError, ValueError) as error:
        raise Untraceable(f"{type(module).__name__}.forward cannot be traced: {error}") from error
    is_self = parameters and parameters[0].kind is not inspect.Parameter.VAR_POSITIONAL
    return parameters[1:] if is_self else parameters


def trace(module: nn.Module, call: ForwardCall) -> fx.Graph:
    """The module's own forward as a graph: a placeholder for each open argument, a node for each child's call.

    Refused, since the graph would not do the same: control flow by values, random numbers drawn in Python, attributes
    that are set. Also tensors made from nothing, and parts under ``no_grad``, autocast or a checkpoint.
    """
    try:
        with _no_side_effects(module), _NothingComputed(), warnings.catch_warnings(action="ignore"):
            return _Tracer(call).trace(module)
    except Exception as error:
        raise Untraceable(f"{type(module).__name__}.forward cannot be traced: {_reason(error)}") from error


class _Tracer(fx.Tracer):
    proxy_buffer_attributes = True

    def __init__(self, call: ForwardCall) -> None:
        super().__init__()
        self.call = call
        self.modes = _modes()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _TracedValue(node, self)

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> Any:
        leaves = [
            self.create_proxy("placeholder", f"argument_{i}", (), {}) if isinstance(leaf, _Slot) else leaf[1]
            for i, leaf in enumerate(self.call.leaves)
        ]
        for leaf, slot in zip(leaves, self.call.leaves, strict=True):
            if isinstance(leaf, _TracedValue):
                leaf.is_tensor = slot is _Slot.TENSOR
        args, kwargs = pytree.tree_unflatten(leaves, self.call.structure)

        def run(root: nn.Module) -> Any:
            return root_fn(root, *args, **kwargs)

        return run, [self.root]

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, fx.Proxy):
            return a.node
        if isinstance(a, Tensor) and not isinstance(a, nn.Parameter):
            raise TypeError("it uses a tensor that is neither an argument nor registered")
        return super().create_arg(a)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if _modes() != self.modes:
            raise TypeError("a part of it runs under a grad mode, autocast or checkpoint of its own")
        return super().create_node(*args, **kwargs)

    def to_bool(self, obj: fx.Proxy) -> bool:
        raise TypeError("it decides by the value or the shape of a tensor")


class _TracedValue(fx.Proxy):
    """A value of the forward. To ``isinstance``, a tensor that is an argument is one; of others nobody knows."""

    is_tensor = False

    @property
    def __class__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if frame_at(1).f_globals.get("__name__", "").startswith("torch."):
            return _TracedValue
        if not self.is_tensor:
            raise TypeError("it decides by the type of a value")
        return Tensor

    def __setitem__(self, *item: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, *item), {})


IN_PLACE = {
    f"__i{name}__": getattr(operator, f"i{name}")
    for name in ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
}
for _name, _function in IN_PLACE.items():  # fx would make x += y out of place

    def _in_place(self: _TracedValue, other: Any, *, function: Any = _function) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    setattr(_TracedValue, _name, _in_place)


class _NothingComputed(TorchDispatchMode):
    """Nothing may be computed while a forward is traced: its result would be a constant in the graph."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise TypeError(f"it computes {func} of tensors that are not its arguments")


def _modes() -> tuple[Any, ...]:
    autocast = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
    hooks = top_saved_hooks(True)
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *autocast, hooks


@contextmanager
def _no_side_effects(module: nn.Module) -> Generator[None]:
    """Restore attributes and Python's random numbers; raise if they were changed."""
    attributes = [(vars(part), dict(vars(part))) for part in module.modules()]
    containers = [
        (name, value, content_of(value))
        for held, _ in attributes
        for name, value in held.items()
        if isinstance(value, list | dict | set)
    ]
    state, numpy_state = random.getstate(), _numpy_state()
    changed: list[str] = []
    try:
        yield
    finally:
        for now, was in attributes:
            changed += [name for name in {**was, **now} if now.get(name, ...) is not was.get(name, ...)]
            restore_content(now, was)
        for name, value, was in containers:
            changed += [] if has_content(value, was) else [name]
            restore_content(value, was)
        drawn = random.getstate() != state or _numpy_state()[2:] != numpy_state[2:]  # how many were drawn
        random.setstate(state)
        np.random.set_state(numpy_state)
    if changed:
        raise TypeError(f"it changes the attribute {changed[0]}")
    if drawn:
        raise TypeError("it draws random numbers in Python")


def _numpy_state() -> tuple[Any, ...]:
    return cast(tuple[Any, ...], np.random.get_state())


def _reason(error: Exception) -> str:
    """The error's first line, and the user's own line that led to it."""
    torchs, ours = str(Path(torch.__file__).parent), __file__
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(torchs) and frame.filename != ours and "contextlib" not in frame.filename
    ]
    first = (str(error) or type(error).__name__).strip().splitlines()[0]
    return f"{first} ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else first
