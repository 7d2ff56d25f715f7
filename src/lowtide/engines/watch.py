"""Warnings about batches, gradients and parameters that a plan did not foresee."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.compat.autograd import graph_task_id
from lowtide.compat.frames import frame_at
from lowtide.compat.modules import forward_pre_hooks, own_parameters
from lowtide.compat.tensors import local_part, sparse_parts
from lowtide.engines.shapes import Signature, is_within, predict_shape, signature
from lowtide.fingerprint import batch_shapes
from lowtide.planning.engine import ENGINES
from lowtide.planning.plan import Plan
from lowtide.sizes import format_size
from lowtide.tracing.call_sites import is_library
from lowtide.tracing.step_state import modules_of
from lowtide.workload import Workload

_MOST_PREDICTED = 8  # batches: each takes as long as tracing a step

_NamedParameter = tuple[dict[str, nn.Parameter | None], str]  # a module's parameters, and the name of one


class BatchWatch:
    """Watch for batches unlike the planned one on the eager engine; the graph engine plans anew for them.

    A batch that is larger in any dimension is predicted once. A warning says if it does not fit.
    ``work`` is the planned step.
    """

    def __init__(self, plan: Plan, work: Workload) -> None:
        self.plan, self.work = plan, work
        planned = signature(work.batch)
        self._fitting = [planned]
        self._seen = {planned} if planned else set[Signature]()
        self._gave_up = self._knows_autocast = False
        self._peaks: dict[Signature, int | None] = {planned: plan.peak_bytes}

    def __call__(self, batch: Any) -> None:
        """Warn of a batch, before its step, unless it was met before; and of an autocast that was not planned."""
        self._look_at_autocast()
        shape = signature(batch)
        if shape in self._seen or batch is None:
            return
        self._seen.add(shape)
        warning = self._warning(shape, batch)
        if warning:
            warnings.warn(warning, RuntimeWarning, stacklevel=3)

    def _look_at_autocast(self) -> None:
        if self._knows_autocast or self.work.autocast or not torch.is_autocast_enabled(self.work.device.type):
            return
        self._knows_autocast = True
        warnings.warn(
            "The step runs under an autocast that it was not planned with: the budget is not promised. "
            "Plan with Workload(..., autocast=...)",
            RuntimeWarning,
            stacklevel=4,
        )

    def peak_bytes(self, batch: Any) -> int:
        """The peak of a step with a batch; the planned one's where it cannot be predicted."""
        peak = self._predict(signature(batch), batch)
        return self.plan.peak_bytes if peak is None else peak

    def _warning(self, shape: Signature, batch: Any) -> str:
        if not shape:
            return (
                "The budget is promised for batches like the planned one. Whether they are cannot be seen: no tensors "
                f"were found in the batch, a {type(batch).__name__}"
            )
        if self._gave_up or any(is_within(shape, fitting) for fitting in self._fitting):
            return ""
        shapes, planned = batch_shapes(batch), self.plan.fingerprint.batch
        if len(self._peaks) > _MOST_PREDICTED:
            self._gave_up = True
            return (
                f"Batches come in more than {_MOST_PREDICTED} shapes beside the planned {planned}, now {shapes}. "
                "No more of them are predicted, and the budget is not promised for larger ones"
            )
        budget = self.plan.budget_bytes
        peak = self._predict(shape, batch)
        if peak is None:
            return f"A batch of {shapes} is not as the planned one, {planned}: the budget is not promised for it"
        if peak > budget:
            return (
                f"A batch of {shapes} does not fit the budget of {format_size(budget)}, which was planned for "
                f"{planned}: its step takes {format_size(peak)}"
            )
        self._fitting.append(shape)
        return ""

    def _predict(self, shape: Signature, batch: Any) -> int | None:
        """The peak with such a batch, each new kernel measured alone; None where a step cannot be predicted."""
        if shape not in self._peaks and len(self._peaks) <= _MOST_PREDICTED:
            try:
                self._peaks[shape] = predict_shape(self.work, batch, device=self.plan.device).peak_bytes
            except Exception:  # the step itself is about to run: an error is better seen there
                self._peaks[shape] = None
        return self._peaks.get(shape)


class ParameterWatch:
    """Watch for gradients from before the step, and for parameters that were frozen at planning.

    Planned steps start without gradients. Each of both is warned about once, and then no longer looked at.
    """

    def __init__(self, plan: Plan, work: Workload, batches: BatchWatch | None) -> None:
        self.plan, self.work, self.batches = plan, work, batches
        self._room = plan.budget_bytes - plan.peak_bytes
        # By their places: parameters may be loaded, or sharded, into others.
        held = map(own_parameters, modules_of(work))
        places = [(own, name) for own in held for name, p in own.items() if p is not None]
        size = sum(_bytes(parameter) for parameter in _at(places))
        self._with_gradients = places if size > self._room else []
        # An engine that captures has other programs for other parameters to train, and says so itself.
        watched = [] if ENGINES[plan.engine].captures else places
        self._frozen = [place for place in watched for p in _at([place]) if not p.requires_grad]

    def __call__(self, batch: Any) -> None:
        """Warn about memory beyond the plan."""
        if any(p.requires_grad for p in _at(self._frozen)):
            warning, self._frozen = self._unfrozen(), []
            warnings.warn(warning, RuntimeWarning, stacklevel=3)
        held = sum(_bytes(p.grad) for p in _at(self._with_gradients) if p.grad is not None)
        if held <= self._room:
            return
        peak = self.plan.peak_bytes if self.batches is None else self.batches.peak_bytes(batch)
        if peak + held > self.plan.budget_bytes:
            self._with_gradients = []
            warnings.warn(self._on_top(held, peak), RuntimeWarning, stacklevel=3)

    def _unfrozen(self) -> str:
        names: dict[Tensor, str] = {parameter: name for name, parameter in self.work.model.named_parameters()}
        trained = [names.get(p, "a parameter of the loss") for p in _at(self._frozen) if p.requires_grad]
        if len(trained) > 4:
            trained[3:] = [f"{len(trained) - 3} more"]
        named = " and ".join(filter(None, (", ".join(trained[:-1]), trained[-1])))
        return (
            f"{named} were frozen when the step was planned, and are trained now: the budget is not promised. "
            "Plan again: step.undo(), then lowtide.plan and lowtide.apply"
        )

    def _on_top(self, held: int, peak: int) -> str:
        budget = self.plan.budget_bytes
        return (
            f"Gradients of {format_size(held)} ({held} bytes) exist before the step and come on top of what was "
            f"planned. It can take up to {format_size(peak + held)}, and {format_size(budget)} were promised. "
            "Unless that much was left free, plan with a budget smaller by it, or free them before: "
            "model.zero_grad(set_to_none=True)"
        )


class ForwardWatch:
    """A forward pre-hook that warns once of training around the planned loss, where the plan saves nothing.

    It calls ``before`` whenever the model runs there, training or not.
    Copies of the model, made by ``copy.deepcopy`` or ``pickle``, are nobody's planned step: their hook is silent.
    """

    def __init__(self, active: bool = True, before: Callable[[], object] = lambda: None) -> None:
        self.active, self.before = active, before

    def __call__(self, module: nn.Module, _: Any) -> None:
        """Warn of a forward pass in training mode, with gradients, that no planned loss asked for."""
        if torch.compiler.is_compiling():
            return
        self.before()
        if not (self.active and module.training and torch.is_grad_enabled()):
            return
        if graph_task_id() != -1:  # recomputed in backward
            return
        level, frame = 1, frame_at(1)
        inner: FrameType | None = frame
        while inner is not None:
            if inner.f_code is Workload.compute_loss.__code__:
                return
            inner = inner.f_back
        while frame.f_back is not None and is_library(frame.f_code.co_filename):
            level, frame = level + 1, frame.f_back
        self.active = False
        warnings.warn(
            "The model ran in training mode outside of the planned loss, where the plan saves no memory. Train with "
            "step(batch), or take step.loss(batch) into your loop in place of the loss of model(x)",
            RuntimeWarning,
            stacklevel=level + 1,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return ForwardWatch, (False,)


@contextmanager
def unwatched(model: nn.Module) -> Generator[None]:
    """Remove the watch on a model's forward for a while: a hook changes Dynamo's order of graph inputs."""
    hooks = forward_pre_hooks(model)
    aside = {key: hook for key, hook in hooks.items() if isinstance(hook, ForwardWatch)}
    for key in aside:
        del hooks[key]
    try:
        yield
    finally:
        hooks.update(aside)


def _at(places: list[_NamedParameter]) -> Iterator[Tensor]:
    """Current parameters, each once."""
    return iter(dict.fromkeys(p for held, name in places if (p := held.get(name)) is not None))


def _bytes(tensor: Any) -> int:
    tensor = local_part(tensor)
    if tensor.layout is torch.strided:
        return tensor.nbytes
    return sum(part.nbytes for part in sparse_parts(tensor))
