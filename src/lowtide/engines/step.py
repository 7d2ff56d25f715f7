"""``apply``: change the user's model by a plan, and run the planned step."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lowtide.engines.watch import BatchWatch, ForwardWatch, ParameterWatch
from lowtide.errors import LowtideError, PlanError, WorkloadError
from lowtide.fingerprint import batch_shapes
from lowtide.optim.used_gradients import mark_used, remove_marks
from lowtide.planning.combinations import leaves_gradients
from lowtide.planning.engine import ENGINES
from lowtide.planning.plan import Plan, check_plan
from lowtide.profiling import Profile, profile
from lowtide.profiling.timing import RunMeter
from lowtide.sizes import format_size
from lowtide.tracing.meter import CpuPeak
from lowtide.tracing.step_state import other_bytes, static_bytes, watch_modules
from lowtide.workload import Workload, autocast

_MEASURED_STEPS = 3


def apply(plan: Plan, work: Workload) -> Step:
    """Change the model in place as the plan says; ``step.undo()`` restores it, bit for bit.

    The model's class, parameters and ``state_dict`` stay as they are. Raises ``PlanError``, with the model
    untouched, if the plan is of another model or batch, or if one of its techniques is not installed.
    """
    check_plan(plan, work, call="lowtide.apply(plan, work)")
    return Step(work, plan)


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds and peak of the first steps, without earlier tensors that the step does not use.

    ``peak_bytes`` is None where none was measured. On a CPU the second and third step are measured, since the first may
    capture the loss. They need batches like the planned one, and a model that replaces none of its tensors.
    """

    peak_bytes: int | None
    seconds: float
    steps: int


class Step:
    """A planned training step: call it with a batch, or use ``loss(batch)`` in your own loop.

    The first three calls are measured; on a GPU that resets PyTorch's peak counter. Both ways warn about a batch that
    does not fit the budget, and about gradients from before the step.
    """

    def __init__(self, work: Workload, plan: Plan) -> None:
        self.plan = plan
        self.measured: Measured | None = None
        self._plain = work
        self._other_bytes = other_bytes(work)
        engine = ENGINES[plan.engine]
        self._applied = engine.apply(work, plan)
        self.work = self._applied.work
        self._warned = False
        self._uses_gradients = [option.technique for option in plan.options if not leaves_gradients(option)]
        self._batches = None if engine.captures else BatchWatch(plan, self.work)
        self._parameters: ParameterWatch | None = ParameterWatch(plan, work, self._batches)
        self._watched = self._watch_forward()

    @property
    def model(self) -> nn.Module:
        """The model, as the plan changed it."""
        return self.work.model

    def __call__(self, batch: Any) -> Tensor:
        """zero_grad, loss, backward, optimizer.step; returns the loss, detached.

        On a plan that uses gradients in backward, any use of what ``.grad`` then holds raises.
        """
        remove_marks(self._plain.optimizer)
        loss = self._measured_run(batch)
        if self._uses_gradients:
            mark_used(self._plain.optimizer, self._uses_gradients)
        return loss

    def _measured_run(self, batch: Any) -> Tensor:
        if self.measured is not None and self.measured.steps >= _MEASURED_STEPS:
            return self._run(batch)
        meter = CpuPeak() if self._is_measured_on_cpu(batch) else None
        held_since = None if meter is None else watch_modules(self.work)
        with RunMeter(self.work.device) as run:
            loss = self._run(batch, meter)
        peak = run.peak_bytes if self.work.device.type == "cuda" else None
        # The allocator does not tell when a tensor from before the step is freed, such as one that a module replaces.
        if meter is not None and meter.bytes is not None and held_since is not None and not held_since():
            peak = meter.bytes + static_bytes(replace(self.work, batch=batch))
        self._note(run.seconds, peak)
        return loss

    def _is_measured_on_cpu(self, batch: Any) -> bool:
        """Tell whether to read the CPU's allocator: for batches like the planned one, after the first step."""
        like_planned = batch_shapes(batch) == self.plan.fingerprint.batch
        return self.work.device.type == "cpu" and self.measured is not None and like_planned

    def loss(self, batch: Any) -> Tensor:
        """The planned loss with its graph, for your own loop; under ``torch.no_grad()`` the loss alone.

        Raises ``PlanError`` if the plan uses gradients in backward: a loop of your own would find none.
        """
        if torch.is_grad_enabled() and self._uses_gradients:
            raise PlanError(
                f"The plan uses gradients in backward ({', '.join(self._uses_gradients)}), and leaves none in .grad",
                hint=f"Train with step(batch), or plan with forbid={self._uses_gradients!r}.",
            )
        return self._loss(batch)

    def _loss(self, batch: Any) -> Tensor:
        if batch is None and self.work.batch is not None:
            raise WorkloadError(
                "The step was called with None for its batch", hint="Pass a batch like the planned one."
            )
        if not torch.is_grad_enabled():  # nothing is kept for backward, so there is nothing to plan
            self._applied.pause()
            work = self._plain if ENGINES[self.plan.engine].captures else self.work
            with autocast(work.device.type, work.autocast):
                return work.loss(self.model, batch)
        if self._batches is not None:  # a program is made for each shape
            self._batches(batch)
        if self._parameters is not None:
            self._parameters(batch)
        return self.work.compute_loss(batch=batch)

    def profile(self) -> Profile:
        """Trace one real planned step on the planned batch, then restore everything."""
        remove_marks(self._plain.optimizer)
        return profile(self.work)

    def undo(self) -> None:
        """Undo the plan's changes. A second call does nothing."""
        remove_marks(self._plain.optimizer)
        if self._watched is not None:
            self._watched.remove()
        self._applied()
        self.work = self._plain
        self._uses_gradients = []
        self._batches = self._parameters = None

    def __reduce_ex__(self, protocol: object) -> Any:
        """Refuse to be copied or pickled: two steps over one model would undo each other's changes."""
        raise LowtideError(
            "A planned step is neither copied nor pickled: it is bound to its model and optimizer",
            hint="Copy the model (copy.deepcopy(step.model)), then apply the plan to a Workload of the copy.",
        )

    def __repr__(self) -> str:
        plan = self.plan
        sizes = f"{format_size(plan.peak_bytes)} of {format_size(plan.budget_bytes)}"
        changes = ", ".join(
            [*(str(choice.option) for choice in plan.choices), *([str(plan.program)] if plan.program else [])]
        )
        name = self._plain.name or type(self.model).__name__
        return f"Step({name} in {sizes}, {plan.engine} engine, {plan.fidelity}: {changes or 'the plain step'})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.undo()

    def _watch_forward(self) -> RemovableHandle | None:
        """Watch for training around the planned loss, if the plan changes the loss."""
        in_model_alone = self.work.loss is self._plain.loss and self.work.autocast == self._plain.autocast
        if in_model_alone or isinstance(self.model, torch.jit.ScriptModule):
            return None
        return self.model.register_forward_pre_hook(ForwardWatch(before=self._applied.pause))

    def _run(self, batch: Any, meter: CpuPeak | None = None) -> Tensor:
        optimizer = self.work.optimizer
        (self.model if optimizer is None else optimizer).zero_grad()
        with nullcontext() if meter is None else meter:
            loss = self._loss(batch)
            loss.backward()
            if optimizer is not None:
                optimizer.step()
        return loss.detach()

    def _note(self, seconds: float, peak: int | None) -> None:
        before = self.measured
        others = min(self._other_bytes, other_bytes(self.work))  # tensors that outlived the step
        peak = None if peak is None else peak - others
        peaks = [p for p in (peak, before.peak_bytes if before else None) if p is not None]
        steps = before.steps + 1 if before else 1
        # The first step of a process warms caches and autotuners up: its time says nothing.
        best = min(seconds, before.seconds) if before and before.steps > 1 else seconds
        self.measured = Measured(max(peaks, default=None), best, steps)
        if peak is not None and peak > self.plan.budget_bytes and not self._warned:
            self._warned = True
            on_gpu = self.work.device.type == "cuda"
            where = "of GPU memory" if on_gpu else "of memory"
            predicted, promised = format_size(self.plan.peak_bytes), format_size(self.plan.budget_bytes)
            besides = f", beside {format_size(others)} of other tensors in this process" if others else ""
            warnings.warn(
                f"A step took {format_size(peak)} {where}{besides}; {predicted} were predicted and {promised} promised",
                RuntimeWarning,
                stacklevel=3,
            )
