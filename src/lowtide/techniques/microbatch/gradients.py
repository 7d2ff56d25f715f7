"""Gradients of one loss after another, summed in place, and handed to autograd as those of one loss.

A piece's gradients are added as the backward pass makes them, so that one set of gradients lives, and one tensor more.
Nothing is written to ``.grad`` and no hook of a parameter runs until the backward pass of the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from lowtide.compat.autograd import tensor_hooks
from lowtide.compat.dispatch import without_autocast
from lowtide.errors import LowtideError
from lowtide.tracing.fake.backward import backward

_foreach_mul_: Any = torch.ops.aten._foreach_mul_.Tensor


class Gradients:
    """The sums, by tensor. Inside ``with``, ``add`` for each piece; then ``attach`` once."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._sums: dict[Tensor, _Sum] = {}
        for tensor in tensors:
            self.follow(tensor)

    def follow(self, tensor: Tensor) -> None:
        """Have this tensor's gradient too."""
        self._sums.setdefault(tensor, _Sum(tensor))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        for each in self._sums.values():
            if each.handle is not None:
                each.handle.remove()
                each.handle = None

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor in self._sums

    def add(self, losses: list[Tensor], share: Tensor, own: Iterable[Tensor] = ()) -> Sequence[Tensor | None]:
        """Add ``share`` times the gradients of a loss, which is taken out of its list; those of ``own`` are returned.

        Autocast is off meanwhile, as it is where people call ``backward()``.
        """
        mine = list(own)
        with without_autocast():
            if losses[0].device.type == "cuda" and not torch.cuda.is_available():
                return self._add_predicted(losses, share, mine)
            with self._summing():
                inputs = [*self._sums, *mine]
                return list(torch.autograd.grad(losses.pop(), inputs, share, allow_unused=True))[len(self._sums) :]

    def attach(
        self,
        loss: Tensor,
        factor: Tensor | None,
        rows: dict[Tensor, Tensor],
        tell: Callable[[Tensor], None] | None = None,
    ) -> Tensor:
        """The loss with a graph: its gradients are the sums times ``factor``; ``rows`` has more of them, whole.

        ``tell`` is called with the gradient that comes back to the loss.
        """
        sums = {tensor: each.sum for tensor, each in self._sums.items() if each.sum is not None}
        sums |= rows
        self._sums.clear()
        return _Whole.apply(*sums, _Held(loss, factor, list(sums.values()), tell)) if sums else loss

    @contextmanager
    def _summing(self) -> Generator[None]:
        """Sum the gradients where they arrive, and keep the hooks that others have on these tensors from running."""
        put_aside: list[tuple[dict[int, Any], dict[int, Any]]] = []
        for tensor, each in self._sums.items():
            if each.handle is None:
                each.handle = tensor.register_hook(each)
            hooks = tensor_hooks(tensor)
            if len(hooks) > 1:
                put_aside.append((hooks, dict(hooks)))
                for key in [
                    key for key, hook in hooks.items() if hook is not each and not hasattr(hook, "part_of_gradient")
                ]:
                    del hooks[key]
            each.is_active = True
        try:
            yield
        finally:
            for each in self._sums.values():
                each.is_active = False
            for hooks, content in put_aside:
                hooks.clear()
                hooks.update(content)

    def _add_predicted(self, losses: list[Tensor], share: Tensor, own: list[Tensor]) -> Sequence[Tensor | None]:
        """The same on fake tensors of a GPU that is not here, which torch's engine does not take."""
        tensors = [tensor for tensor in (*self._sums, *own) if tensor.is_leaf]
        held = [tensor.grad for tensor in tensors]
        for tensor in tensors:
            tensor.grad = self._sums[tensor].sum if tensor in self._sums else None
        scaled = [losses.pop() * share]
        backward(scaled.pop(), lambda _: None)
        for tensor, each in self._sums.items():
            each.sum = tensor.grad if tensor.is_leaf else None
        of_own = [tensor.grad for tensor in own]
        for tensor, gradient in zip(tensors, held, strict=True):
            tensor.grad = gradient
        return of_own


class _Sum:
    """The sum of a tensor's gradients so far: a hook that adds one, and puts the sum in its place."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.sum: Tensor | None = None
        self.handle: torch.utils.hooks.RemovableHandle | None = None
        self.is_active = False  # a loss may take gradients itself

    def __call__(self, gradient: Tensor) -> Tensor | None:
        if not self.is_active:
            return None
        if self.sum is None:
            # A copy: the gradient may be a view, or that of another tensor too.
            plain = gradient.layout is torch.strided and type(gradient) is type(self.tensor.data)
            self.sum = torch.empty_like(self.tensor).copy_(gradient) if plain else gradient.clone()
        elif self.sum.layout is not torch.strided and gradient.layout is torch.strided:
            self.sum = gradient.clone().add_(self.sum)
        else:
            self.sum.add_(gradient)
        return self.sum


@dataclass
class _Held:
    """State that the node of the whole loss keeps."""

    loss: Tensor | None
    factor: Tensor | None
    gradients: list[Tensor] | None
    tell: Callable[[Tensor], None] | None


class _Whole(torch.autograd.Function):
    """A loss whose gradients are computed already."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.held = held = args[-1]  # after the tensors whose gradients it has
        loss, held.loss = held.loss, None
        assert loss is not None
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        held: _Held = ctx.held
        if torch.is_grad_enabled():
            raise LowtideError(
                "Gradients of gradients do not go through a batch in pieces",
                hint="Leave out create_graph=True, or take the gradients inside of the loss.",
            )
        if held.gradients is None:
            raise LowtideError(
                "The backward pass of a batch in pieces runs once: its gradients have been handed out",
                hint="Compute the loss again.",
            )
        sums, held.gradients = held.gradients, None
        scale = gradients[0].reshape(())
        if held.tell is not None:
            held.tell(scale)
        if held.factor is not None:
            scale = scale * held.factor
        dense = [gradient for gradient in sums if gradient.layout is torch.strided]
        for gradient in sums:
            if gradient.layout is not torch.strided:
                gradient.mul_(scale)
        if dense:
            _foreach_mul_(dense, scale)
        del dense
        return *sums, None
