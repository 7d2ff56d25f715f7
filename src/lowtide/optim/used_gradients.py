"""Marks in ``.grad`` for gradients that were used in backward: a read of their values raises."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from lowtide.compat.tensors import make_wrapper
from lowtide.errors import LowtideError
from lowtide.optim.hooks import hook_owners
from lowtide.optim.one_parameter import parameters_in

_MOVES = ("aten::_to_copy", "aten::detach")  # of a model: the mark goes with its parameter
_ZEROS = ("aten::zero_", "aten::_foreach_zero_")  # of zero_grad(set_to_none=False), which reads no values


class UsedGradient(Tensor):
    """A gradient without values: it has a shape, no bytes, and every op on it raises.

    ``.grad`` cannot raise when it is read: torch's own optimizers, ``zero_grad`` and ``Module.to`` read it, too. So
    the first use of the mark raises. Moving a model, and setting the gradient to zero, pass.
    """

    techniques: Sequence[str]

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.name()
        if name in _ZEROS:
            return args[0] if isinstance(args[0], Tensor) else None
        if name in _MOVES and isinstance(args[0], UsedGradient):
            chosen = {key: value for key, value in (kwargs or {}).items() if key in ("dtype", "device") and value}
            return _mark(args[0], args[0].techniques, **chosen)
        used = next((each for each in _flat((args, kwargs or {})) if isinstance(each, UsedGradient)), None)
        _refuse([] if used is None else used.techniques)

    def __repr__(self, *_: Any, **__: Any) -> str:
        return f"UsedGradient(of shape {tuple(self.shape)}, used in backward)"

    def share_memory_(self) -> UsedGradient:
        """There are no bytes to share."""
        return self

    def numpy(self, *_: Any, **__: Any) -> NoReturn:
        _refuse(self.techniques)

    def tolist(self) -> NoReturn:
        _refuse(self.techniques)

    def __reduce_ex__(self, proto: Any) -> NoReturn:
        _refuse(self.techniques)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        _refuse(self.techniques)


def mark_used(optimizer: torch.optim.Optimizer | None, techniques: Sequence[str]) -> None:
    """Mark the parameters whose gradients were used in the optimizer's last step, by these techniques."""
    for owner in hook_owners(optimizer) if optimizer is not None else ():
        for parameter in getattr(owner, "used", ()):
            if parameter.grad is None and type(parameter) in (Tensor, nn.Parameter):
                parameter.grad = _mark(parameter, techniques)


def remove_marks(optimizer: torch.optim.Optimizer | None) -> None:
    """Set ``.grad`` to None where it is a mark."""
    for parameter in [] if optimizer is None else parameters_in(optimizer):
        if isinstance(parameter.grad, UsedGradient):
            parameter.grad = None


def _mark(like: Tensor, techniques: Sequence[str], **changed: Any) -> UsedGradient:
    chosen = {"dtype": like.dtype, "device": like.device, **changed}
    mark: UsedGradient = make_wrapper(UsedGradient, like.shape, strides=like.stride(), **chosen)
    mark.techniques = techniques
    return mark


def _flat(value: Any) -> list[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    return [leaf for each in value for leaf in _flat(each)] if isinstance(value, (list, tuple)) else [value]


def _refuse(techniques: Sequence[str]) -> NoReturn:
    names = list(techniques)
    raise LowtideError(
        f"A gradient is read that the planned step used in backward ({', '.join(names)}): .grad holds none",
        hint=f"Plan with forbid={names!r} for a loop that reads gradients.",
    )
