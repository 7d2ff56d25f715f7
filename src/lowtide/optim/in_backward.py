"""The optimizer inside backward: a parameter is stepped as soon as its gradient is complete, and the gradient freed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowtide.compat.autograd import gradient_hooks
from lowtide.errors import LowtideError
from lowtide.optim.hooks import (
    part_of,
    refuse_closure,
    refuse_unsharded,
    refuse_where,
    set_amp_scaling,
    trainable_parameters,
    use_gradients,
)
from lowtide.optim.one_parameter import SingleStep, refuse_joint_step
from lowtide.undo import Undo


def step_in_backward(optimizer: torch.optim.Optimizer) -> Undo:
    """Step every parameter of the optimizer in ``loss.backward()``; gradients are never all alive.

    Results are the plain step's, bit for bit. The optimizer stays the same object, so schedulers and ``state_dict``
    keep working; ``optimizer.step()`` does nothing. One backward is one step, so gradients are not accumulated.
    torch's clipping, a ``GradScaler``'s step and a step with a closure raise. Keep a reference to the optimizer: once
    it is freed without an undo, ``backward`` raises.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> optimizer = torch.optim.SGD([weight], lr=0.5)
    >>> with step_in_backward(optimizer):
    ...     weight.sum().backward()
    >>> weight, weight.grad
    (Parameter containing:
    tensor([0.5000, 0.5000], requires_grad=True), None)
    """
    parameters = trainable_parameters(optimizer)
    if any(map(is_stepped_in_backward, parameters)):
        raise LowtideError(
            "A parameter is stepped in backward already", hint="Call undo() of the first one before applying it."
        )
    refuse_unsharded(parameters)
    refuse_where(optimizer, "needs_step", "steps in backward")
    refuse_joint_step(optimizer)
    hook = StepHook(optimizer)
    undo = Undo(optimizer.register_step_pre_hook(hook.before).remove)  # which holds the hook
    undo.add(set_amp_scaling(optimizer, True))
    undo.add(use_gradients(optimizer, hook))
    return undo


def is_stepped_in_backward(parameter: Tensor) -> bool:
    """Tell whether backward leaves no gradient of it."""
    return any(hasattr(hook, "is_step") for hook in gradient_hooks(parameter).values())


class StepHook:
    """Runs when a parameter's gradient is complete."""

    is_step = True
    leaves_no_gradient = "is stepped in backward"

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.step = SingleStep(optimizer)
        self.used: list[Tensor] = []  # parameters that were stepped before the last call of the optimizer's step
        self._stepped: dict[Tensor, None] = {}  # since that call

    def of(self, optimizer: torch.optim.Optimizer) -> StepHook:
        """The hook for a copy of the optimizer, over other parameters."""
        return StepHook(optimizer)

    def __call__(self, parameter: Tensor) -> None:
        refuse_unsharded([parameter])  # processes may have been started since
        part = part_of(self.step.optimizer)  # looked up each time: it may come after this
        if part is not None and part.takes(parameter):
            with torch.no_grad():
                part.run(self.step, [parameter])
        else:
            self.step(parameter)
        parameter.grad = None
        self._stepped[parameter] = None

    def before(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Called by torch before a step, which finds nothing left to do: refuse what would need gradients then."""
        refuse_closure(optimizer, args, kwargs)
        self.used, self._stepped = list(self._stepped), {}
        if "found_inf" in vars(optimizer):
            for name in ("found_inf", "grad_scale"):
                vars(optimizer).pop(name, None)
            raise LowtideError(
                "A GradScaler cannot unscale gradients that were used in backward: the steps used scaled ones",
                hint="Use bfloat16, which needs no scale, or leave steps until after backward. Restore the parameters.",
            )
