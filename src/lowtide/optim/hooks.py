"""Parts of an optimizer's step, by torch's own hooks: the optimizer stays the object that it was."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lowtide.compat.autograd import gradient_hooks
from lowtide.compat.optimizers import AMP_SCALING, step_pre_hooks, watch_clipping
from lowtide.errors import LowtideError
from lowtide.optim.one_parameter import SingleStep, parameters_in
from lowtide.undo import Undo

_Hook = TypeVar("_Hook", bound=Callable[..., Any])


class StepPart(ABC):
    """Steps parameters before the optimizer's own step, which then finds no gradient of theirs.

    Subclass it and write ``run``. Gradients are restored after the step.
    """

    part_of_step = True  # a trace leaves hooks of the user's own out, but not this
    one_at_a_time = True  # see ``takes_one_at_a_time``

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.single = SingleStep(optimizer)
        self._gradients: list[tuple[Tensor, Tensor | None]] = []

    def takes(self, parameter: Tensor) -> bool:
        """Tell whether this part steps the parameter, which has a gradient."""
        return True

    def ready(self, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        """The parameters to step now."""
        return [p for p in parameters_in(optimizer) if p.grad is not None and self.takes(p)]

    @abstractmethod
    def run(self, single: SingleStep, parameters: list[Tensor]) -> None:
        """Step parameters by their gradients."""

    def before(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Called by torch before a step. The optimizer may be a copy over fake tensors."""
        refuse_closure(optimizer, args, kwargs)
        parameters = self.ready(optimizer)
        single = self.single if optimizer is self.single.optimizer else SingleStep(optimizer)
        with torch.no_grad():
            self.run(single, parameters)
        self._gradients = [(p, p.grad) for p in parameters]
        for parameter in parameters:
            parameter.grad = None

    def after(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Called by torch after a step."""
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        self._gradients = []


def one_at_a_time(hook: _Hook) -> _Hook:
    """Mark a hook around steps as one that works where parameters are stepped one at a time."""
    vars(hook)["one_at_a_time"] = True
    return hook


def takes_one_at_a_time(hook: Any) -> bool:
    """Tell whether a hook around steps works where parameters are stepped one at a time, as in backward."""
    return any(getattr(each, "one_at_a_time", False) is True for each in (hook, getattr(hook, "__self__", None)))


@one_at_a_time
def refuse_closure(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A hook before a step: refuse a closure."""
    if any(value is not None for value in (*args[1:], kwargs.get("closure"))):
        raise LowtideError("A step with a closure computes gradients of its own", hint="Call step() without one.")


def take_part(optimizer: torch.optim.Optimizer, part: StepPart) -> Undo:
    """Let ``part`` do its parameters' steps until the undo is called. There can be one of them."""
    other = part_of(optimizer)
    if other is not None:
        raise LowtideError(
            f"The optimizer's step is already done by {other}, and cannot be by {part} too",
            hint="Call undo() of the first one.",
        )
    handles = (optimizer.register_step_pre_hook(part.before), optimizer.register_step_post_hook(part.after))
    undo = Undo(*(handle.remove for handle in handles))
    if AMP_SCALING in vars(optimizer):
        undo.add(set_amp_scaling(optimizer, False))
    return undo


def set_amp_scaling(optimizer: torch.optim.Optimizer, value: bool) -> Undo:
    """Mark who handles a ``GradScaler``'s scale. True: it is left on the optimizer before a step, where a hook sees it.

    False: the scaler unscales gradients and leaves out steps that overflow, which only fused steps do themselves.
    """
    before = vars(optimizer).get(AMP_SCALING)
    setattr(optimizer, AMP_SCALING, value)

    def restore() -> None:
        if before is None:
            vars(optimizer).pop(AMP_SCALING, None)
        elif AMP_SCALING in vars(optimizer):  # it may be one of another class by now
            setattr(optimizer, AMP_SCALING, before)

    return Undo(restore)


class WeakHook:
    """Calls a hook that the optimizer holds, and has its attributes; raises once the optimizer is freed.

    torch never frees an object that a parameter's own hook refers to and that refers to the parameter.
    """

    def __init__(self, hook: Callable[[Tensor], None]) -> None:
        self._hook = weakref.ref(hook)

    def __call__(self, parameter: Tensor) -> None:
        hook = self._hook()
        if hook is None:
            raise LowtideError(
                f"A parameter of {tuple(parameter.shape)} is stepped in backward, or has its gradient stored, "
                "by an optimizer that was freed",
                hint="Keep a reference to the optimizer, or call undo() before you drop it.",
            )
        hook(parameter)

    def is_freed(self) -> bool:
        """Tell whether the optimizer was freed without an undo."""
        return self._hook() is None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._hook(), name)


def use_gradients(optimizer: torch.optim.Optimizer, hook: Callable[[Tensor], None]) -> Undo:
    """Call ``hook``, which the optimizer holds, in backward for each parameter whose gradient is complete.

    Replaces hooks of optimizers that were freed without an undo: nothing else could remove them.
    """
    undo = Undo(refuse_clipping(optimizer))
    weak = WeakHook(hook)
    for parameter in trainable_parameters(optimizer):
        hooks = gradient_hooks(parameter)
        for key in [key for key, other in hooks.items() if isinstance(other, WeakHook) and other.is_freed()]:
            del hooks[key]
        undo.add(parameter.register_post_accumulate_grad_hook(weak).remove)
    return undo


def trainable_parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the parameters that get gradients. Refuse an optimizer that cannot step one at a time."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise LowtideError("LBFGS steps all parameters as one", hint="Use another optimizer.")
    return [p for p in parameters_in(optimizer) if p.requires_grad]


_refusals: set[object] = set()  # one for each optimizer that uses gradients in backward
_watching = Undo()  # of torch's clipping, while there are refusals


def refuse_clipping(optimizer: torch.optim.Optimizer) -> Undo:
    """Have torch's clipping raise for parameters whose gradients are gone: it would clip nothing.

    Ends with the undo, or when the optimizer is freed without it.
    """
    refusal = object()
    _refusals.add(refusal)  # first, so that an optimizer that is freed meanwhile does not end the watch
    end = weakref.finalize(optimizer, _end_refusal, refusal)
    end.atexit = False
    with Undo(end) as undo:
        if len(_refusals) == 1:
            _watching.add(watch_clipping(_see_clipped))
        return undo.keep()


def _end_refusal(refusal: object) -> None:
    _refusals.discard(refusal)
    if not _refusals:
        _watching()


def _see_clipped(parameters: Iterable[Tensor]) -> None:
    for parameter in parameters:
        for hook in gradient_hooks(parameter).values() if parameter.grad is None else ():
            reason = getattr(hook, "leaves_no_gradient", None)
            if reason is not None:
                raise LowtideError(
                    f"A parameter of {tuple(parameter.shape)} {reason}: it has no gradient to clip",
                    hint="Leave out clipping, or undo what uses gradients in backward: a plan is made without it by "
                    "forbid=['optimizer_in_backward', 'stored_gradients'].",
                )


def refuse_where(optimizer: Any, needs: Literal["needs_gradients", "needs_step"], what: str) -> None:
    """Refuse ``what`` where something that acts before the step says that it ``needs`` what would not be there."""
    for owner in hook_owners(optimizer):
        reason = getattr(owner, needs, None)
        if reason is not None:
            raise LowtideError(f"{reason}, and {what} leave nothing for it", hint="Undo one of the two.")


def refuse_unsharded(parameters: Iterable[Tensor]) -> None:
    """Refuse whole parameters among several processes.

    ``DistributedDataParallel`` sums their gradients over processes only after the parameters' own hooks have run.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return
    from torch.distributed.tensor import DTensor

    if not all(isinstance(parameter, DTensor) for parameter in parameters):
        raise LowtideError(
            "Gradients would be used in backward, before DistributedDataParallel sums them over processes",
            hint="Use FSDP2 (fully_shard), which sums them before, or leave gradients until the step.",
        )


def part_of(optimizer: Any) -> StepPart | None:
    """Return the part that does the steps of this optimizer, or None."""
    return next((owner for owner in hook_owners(optimizer) if isinstance(owner, StepPart)), None)


def hook_owners(optimizer: Any) -> Iterator[object]:
    """Yield the objects whose methods torch calls before a step."""
    for hook in step_pre_hooks(optimizer).values():
        yield getattr(hook, "__self__", None)
