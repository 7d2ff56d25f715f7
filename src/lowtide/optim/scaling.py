"""Loss scaling for float16: gradients are scaled while they pass through 16 bits, and are right where they arrive."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from lowtide.compat.autograd import call_after_backward, graph_task_id
from lowtide.compat.optimizers import register_first_step_pre_hook
from lowtide.errors import LowtideError
from lowtide.optim.gradients import GradientStore
from lowtide.optim.hooks import part_of
from lowtide.optim.in_backward import is_stepped_in_backward
from lowtide.optim.one_parameter import parameters_in
from lowtide.undo import Undo

SAVED = "loss_scale"  # in an optimizer's first group, where it is saved


class LossScale:
    """A scale of gradients between the loss and the parameters, adapted to the range of float16.

    ``scale(loss, model)`` returns the loss with the same value. Each gradient is divided by the scale where it reaches
    its parameter, so ``p.grad`` is unscaled, and clipping and accumulation need no care. A backward pass is scaled as a
    whole: write ``scale(loss + penalty, model)`` or ``scale(loss, model) + scale(penalty, model)``. Gradients of other
    tensors than the model's parameters stay scaled.

    ``guard(optimizer)`` skips steps with infinite or nan gradients, and halves the scale; after ``growth_interval``
    good steps it doubles. If several optimizers are guarded, their steps after one backward pass change the scale once.
    Like ``torch.amp.GradScaler``, it waits for the device once a step. The optimizer's ``state_dict`` holds the scale.
    """

    needs_gradients = needs_step = "A scaled loss looks at the gradients before the step"

    def __init__(self, initial: float = 2.0**16, growth_interval: int = 2000) -> None:
        self.value = initial
        self.growth_interval = growth_interval
        self.good_steps = 0
        self._hooked = WeakTensorKeyDictionary()
        self._handles: list[Any] = []
        self._pass: weakref.ref[_Pass] | None = None  # the last backward pass that had a scale
        self._stepped: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # since then
        self._unchanged, self._overflowed = initial, False  # the scale before their steps, and whether one was left out

    def scale(self, loss: Tensor, model: nn.Module) -> Tensor:
        """Return the same loss, whose backward pass starts from the scale."""
        for parameter in model.parameters():
            if parameter.requires_grad and parameter not in self._hooked:
                self._hooked[parameter] = True
                self._handles.append(parameter.register_hook(_Unscale(self)))
        return _ScaledLoss.apply(loss, self)  # pyright: ignore[reportReturnType]

    def guard(self, optimizer: torch.optim.Optimizer) -> Undo:
        """Leave steps out whose gradients are not finite; refused where none are left to look at until the step."""
        is_used = any(map(is_stepped_in_backward, parameters_in(optimizer)))
        if is_used or isinstance(part_of(optimizer), GradientStore):
            raise LowtideError(
                "A scaled loss needs its gradients until the step, and this optimizer has none by then",
                hint="Use bfloat16, which needs no scale, or undo the stored gradients or the steps in backward.",
            )
        return Undo(
            # Before those that step parameters themselves.
            register_first_step_pre_hook(optimizer, self._before).remove,
            optimizer.register_state_dict_post_hook(self._save).remove,
            optimizer.register_load_state_dict_post_hook(self._load).remove,
        )

    def remove(self) -> None:
        """Take the hooks from the parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._hooked.clear()

    def state_dict(self) -> dict[str, float]:
        """Return what a resumed run needs. A guarded optimizer saves it with its own state."""
        return {"value": self.value, "good_steps": self.good_steps}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from there."""
        self.value, self.good_steps = float(state["value"]), int(state["good_steps"])
        self._stepped.clear()

    def _running(self) -> float | None:
        """The scale of the backward pass that runs; None where it has none, or none runs."""
        running = None if self._pass is None else self._pass()
        return None if running is None or running.is_over else running.scale

    def _enter(self) -> float:
        """The same, from a scaled loss's node: now it has one, until it is over or has failed."""
        scale = self._running()
        if scale is not None:
            return scale
        self._stepped.clear()
        if graph_task_id() != -1:  # a prediction has a backward pass in Python, without these hooks
            begun = _Pass(self.value)
            call_after_backward(begun)
            self._pass = weakref.ref(begun)
        return self.value

    def _before(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        held = [p for p in parameters_in(optimizer) if p.grad is not None]
        finite = _are_finite([p.grad for p in held if p.grad is not None])
        self._follow(optimizer, finite=finite)
        if not finite:
            for parameter in held:  # an optimizer leaves out what has no gradient
                parameter.grad = None

    def _follow(self, optimizer: torch.optim.Optimizer, *, finite: bool) -> None:
        """Change the scale once for all steps after a backward pass: one that is left out takes growth back."""
        if optimizer in self._stepped:  # again: its gradients are others, wherever they come from
            self._stepped.clear()
        is_first = not self._stepped
        self._stepped.add(optimizer)
        if is_first:
            self._unchanged, self._overflowed = self.value, False
        if not finite and not self._overflowed:
            self.value, self.good_steps, self._overflowed = self._unchanged / 2, 0, True
        elif finite and is_first:
            self.good_steps += 1
            if self.good_steps >= self.growth_interval:
                self.value, self.good_steps = self.value * 2, 0

    def _save(self, _: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        state_dict["param_groups"][0][SAVED] = self.state_dict()

    def _load(self, optimizer: torch.optim.Optimizer) -> None:
        saved = optimizer.param_groups[0].pop(SAVED, None)
        if saved is not None:  # a run that had no scale saved none
            self.load_state_dict(saved)


def _are_finite(gradients: list[Tensor]) -> bool:
    """Whether nothing is infinite or nan, by the largest value: other norms overflow where all values are finite."""
    largest = nn.utils.get_total_norm([each for each in gradients if each.numel()], torch.inf)
    return bool(largest.isfinite())  # waits for the device once


class _Pass:
    """A backward pass with its scale. The pass itself holds it, and calls it at its end: one that fails lets it go."""

    def __init__(self, scale: float) -> None:
        self.scale = scale
        self.is_over = False

    def __call__(self) -> None:
        self.is_over = True


class _Unscale:
    """At a parameter: in the parameter's own precision, before the gradient is accumulated."""

    __torch_unserializable__ = True  # a pickle of the model goes without, as it should
    part_of_gradient = True  # runs even where users' hooks are left out

    def __init__(self, scale: LossScale) -> None:
        self.scale = scale

    def __call__(self, gradient: Tensor) -> Tensor:
        scale = self.scale._running()
        return gradient if scale is None else gradient / scale


class _ScaledLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, scale: LossScale) -> Tensor:
        ctx.scale = scale
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * ctx.scale._enter(), None
