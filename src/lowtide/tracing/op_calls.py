"""An op call without its tensors, which can be repeated alone on real memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lowtide.compat import pytree
from lowtide.compat.operators import schema_of


@dataclass(frozen=True, slots=True)
class _TensorShape:
    """Placeholder for a tensor in a call."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: str  # "meta" for what a fake kernel left without a place, such as the seed of an attention

    def make(self, device: torch.device) -> Tensor:
        where = torch.device("cpu") if self.device == "cpu" else device
        tensor = torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=where)
        return tensor.uniform_(-1, 1) if self.dtype.is_floating_point and tensor.element_size() > 1 else tensor.zero_()


@dataclass(frozen=True, slots=True)
class Call:
    """One op with the shapes of its tensors."""

    function: Any
    args: Any
    kwargs: Any

    @staticmethod
    def of(function: Any, args: Any, kwargs: Any) -> Call:
        """Record a call without its tensors."""

        def shape(tensor: Tensor) -> _TensorShape:
            return _TensorShape(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device.type)

        args, kwargs = pytree.tree_map_only(Tensor, shape, (args, kwargs))
        return Call(function, args, kwargs)

    @property
    def runs_alone(self) -> bool:
        """Tell whether invented values are safe: a library's own records (bytes, seeds) cannot be invented."""
        tensors = [leaf for leaf in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(leaf, _TensorShape)]
        name = self.function.__name__
        if self.function.namespace == "bitsandbytes":  # its codes are places in a table of 256: any will do
            return True
        if self.function.namespace not in ("aten", "lowtide") or "foreach" in name or "attention_backward" in name:
            return False
        return not any(shape.dtype in (torch.uint8, torch.uint64) or shape.device == "meta" for shape in tensors)

    def tensors(self, device: torch.device) -> tuple[Any, Any]:
        """Arguments for a call: floats are random, integers zero."""
        return pytree.tree_map_only(_TensorShape, lambda s: s.make(device), (self.args, self.kwargs))


def draws(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether an op call draws random numbers: one that drops a share of 0 does not."""
    if torch.Tag.nondeterministic_seeded not in function.tags:
        return False
    share = next((name for name in ("dropout_p", "dropout") if name in _positions(function)), None)
    return share is None or bool(_argument(share, function, args, kwargs))


def trains(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether an op call is told to train, as batch norms are; those that update statistics always do."""
    return "with_update" in function.__name__ or _argument("training", function, args, kwargs) is True


def _argument(name: str, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An argument as it was given; None where it was left at its default."""
    place = _positions(function).get(name, len(args))
    return args[place] if place < len(args) else kwargs.get(name)


@cache
def _positions(function: Any) -> dict[str, int]:
    return {argument.name: place for place, argument in enumerate(schema_of(function).arguments)}
