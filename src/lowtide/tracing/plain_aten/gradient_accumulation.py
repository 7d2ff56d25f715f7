"""Accumulation of two gradients of one tensor, in place where a plain step does.

torch's engine adds the second to the first in place if nothing else holds the first. Under a dispatch mode it always
makes a third tensor. A trace must do what a plain step does, so the recorder asks here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lowtide.compat.dispatch import TorchDispatchMode, without_modes
from lowtide.compat.tensors import storage_holders, tensor_holders

ADD = torch.ops.aten.add.Tensor
ADD_IN_PLACE = torch.ops.aten.add_.Tensor


Counts = tuple[int, int, int]  # references to a tensor: in C++, to its storage, and in Python


def engine_adds(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], counts: Counts) -> bool:
    """Tell whether this op may be torch's engine adding two gradients that it could add in place.

    ``counts`` are those of a gradient that only the engine holds. Ops inside a backward formula look the same: the
    recorder tells them apart, by the op that returned the first gradient.
    """
    if func is not ADD or kwargs or torch.is_grad_enabled():
        return False
    return isinstance(args[1], Tensor) and fits(args[0], args[1]) and _held_by(args) == counts


def is_named_in_python(args: tuple[Any, ...], counts: Counts) -> bool:
    """Tell whether Python holds a dispatched op's first argument. If not, a composite op of torch's made it."""
    return _held_by(args)[1:] != counts[1:]


def fits(old: Tensor, new: Tensor) -> bool:
    """Tell whether the sum of two gradients can take the first one's place."""
    return (
        old.layout is new.layout is torch.strided
        and old.shape == new.shape
        and old.dtype == new.dtype
        and torch.ops.aten.is_non_overlapping_and_dense.default(old)
    )


def held_twice(tensor: Tensor) -> bool:
    """Tell whether a tensor, its storage too, is held by two Python names of the caller and nothing else."""
    names = sys.getrefcount(tensor) - 2 - held_by_call()  # less this function's argument and getrefcount's own
    return names == 2 and tensor_holders(tensor) == 1 and storage_holders(tensor) == 2


def held_by_call() -> int:
    """References that a Python call holds to its argument, beside the function's own name for it.

    Not at all, unless something evaluates frames in Python's place: Dynamo does, and goes on after it failed.
    """
    return _references(object()) - 2


def _references(value: object) -> int:
    return sys.getrefcount(value)


def _held_by(args: tuple[Any, ...]) -> Counts:
    """Count references to a dispatched op's first argument; a hook in Python may hold it."""
    return tensor_holders(args[0]), storage_holders(args[0]), sys.getrefcount(args[0])


class _Watch(TorchDispatchMode):
    counts = (0, 0, 0)

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is ADD:
            self.counts = _held_by(args)
        return func(*args, **(kwargs or {}))


def measure_engine_counts() -> Counts:
    """Count the references to a gradient that only the engine holds, in a tiny step."""
    watch = _Watch()
    with without_modes(), torch.enable_grad():
        x = torch.ones(2, device="cpu", requires_grad=True)
        y = x.exp()
        loss = y.sin().dot(y.cos())
        with watch:
            loss.backward()
    return watch.counts
