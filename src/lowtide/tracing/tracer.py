"""Run a step to trace it, real or fake, and restore everything."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lowtide.batches import with_own_containers
from lowtide.compat import profiler
from lowtide.compat.dynamo import silenced
from lowtide.compat.fake import (
    FAKE_KERNELS,
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from lowtide.compat.messages import is_about_devices, refuses_saved_hooks
from lowtide.compat.tensors import storage_id
from lowtide.errors import LowtideError, TraceError, WorkloadError
from lowtide.kernels.launches import watched
from lowtide.tracing.call_sites import running_modules
from lowtide.tracing.compiled import compiled_modules, is_compiled, opaque_compiled_graphs
from lowtide.tracing.fake.backward import backward
from lowtide.tracing.fake.gpu import GPU_FIXES, GPU_SUBSTITUTES, emulated_gpu
from lowtide.tracing.fake.kernel_dispatch import FakeKernels
from lowtide.tracing.fake.kernels import FIXES, SUBSTITUTES
from lowtide.tracing.fake.workload import fake_workload, known_value, second_step
from lowtide.tracing.generators import watch_generator_states
from lowtide.tracing.graph import Graph, handed_on
from lowtide.tracing.meter import CpuMeter, CudaMeter, Meter, NoMeter
from lowtide.tracing.op_calls import Call
from lowtide.tracing.optimizer_step import init_optimizer_state, without_step_hooks
from lowtide.tracing.owners import Owners, named_gradients, own_everything
from lowtide.tracing.recorder import Recorder
from lowtide.tracing.snapshot import unchanged
from lowtide.tracing.step_state import clear_gradients, own_storages, parameters_of, state_tensors, watch_modules
from lowtide.workload import Workload

_ITEM = torch.ops.aten._local_scalar_dense.default


def trace(
    work: Workload, *, fake: bool = False, device: str | None = None, calls: dict[str, Call] | None = None
) -> Graph:
    """Trace one training step: zero_grad, forward, backward, optimizer.

    The step is the steady one. Gradients start as None. Optimizer state exists, and so do tensors that modules hold
    from earlier steps. A real step runs on the model's own device. A fake one allocates and computes nothing, and can
    be of another ``device`` ("cpu", "cuda", or a name of the device table such as "h200"). The step's state is restored
    bit for bit: see ``lowtide.tracing.snapshot``. ``calls``, if given, is filled with one call for each distinct
    signature.
    """
    if isinstance(work.optimizer, torch.optim.LBFGS):
        raise WorkloadError(
            "LBFGS runs the loss several times in a step, as it likes",
            hint="Profile with another optimizer, or with none: the peak of each evaluation is that of a step.",
        )
    target = work.device.type if device is None else device
    if work.device.type == "meta" and target == "meta":
        target = "cpu"
    fake = fake or work.device.type == "meta"
    if not fake and target != work.device.type:
        raise TraceError(
            f"A real step runs where the model is, on {work.device}",
            hint=f"Move the model, or predict the step on {target}: fake=True.",
        )
    try:
        return _trace(work, target, calls, fake=fake, saves=True)
    except (RuntimeError, TraceError) as error:
        if not refuses_saved_hooks(error):
            raise
    return _trace(work, target, calls, fake=fake, saves=False)


def _trace(work: Workload, target: str, calls: dict[str, Call] | None, *, fake: bool, saves: bool) -> Graph:
    aside = [p.grad for p in parameters_of(work) if p.grad is not None]
    for after_another in (False, True):
        if calls is not None:
            calls.clear()
        recorder = Recorder(_meter(work.device, aside, target, fake=fake), calls=calls, fake=fake)
        run = _run_fake if fake else _run
        with unchanged(work, fake=fake):
            graph, is_steady = run(work, recorder, target, saves=saves, after_another=after_another)
        if is_steady:
            break
    _warn_of_survivors(recorder, work, fake=fake)
    return graph


def _run_fake(
    work: Workload, recorder: Recorder, target: str, *, saves: bool, after_another: bool
) -> tuple[Graph, bool]:
    """Run one step as ``_run`` does, on fake tensors."""
    device = torch.device("cpu" if target == "cpu" else "cuda")
    # An op without a fake kernel runs for real, on zeros: where it cannot, it is to be named.
    is_here = device.type == "cpu" or torch.cuda.is_available()
    mode = FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=is_here)
    try:
        with ExitStack() as stack:
            if device.type == "cuda":
                stack.enter_context(emulated_gpu())
            stack.enter_context(silenced(FAKE_KERNELS))
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            fake = stack.enter_context(fake_workload(work, mode, device))
            stack.enter_context(mode)
            return _run(fake, recorder, target, fake=True, saves=saves, after_another=after_another)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise TraceError(
            f"The step looks at a tensor's values ({error})", hint="Profile a real step: leave out fake=True."
        ) from error
    except LowtideError:
        raise
    except RuntimeError as error:  # torch's own: an op without a fake kernel, or one that a fake tensor trips
        hint = "If it runs on real ones, profile that: leave out fake=True."
        if is_about_devices(error):
            hint = "Make tensors that are neither in the model nor in the batch on the device of the input."
        what = next(iter(str(error).splitlines()), "")
        raise TraceError(f"The step does not run on fake tensors ({what})", hint=hint) from error


def _run(
    work: Workload, recorder: Recorder, device: str, *, saves: bool, after_another: bool, fake: bool = False
) -> tuple[Graph, bool]:
    """Run one step under the recorder. Also tell whether it is steady: modules hold the same tensors after.

    ``saves`` says whether to list what is saved for backward, ``after_another`` to run another step before.
    """
    first, work = (replace(work, batch=with_own_containers(work.batch)) for _ in range(2))
    substitutes = {**SUBSTITUTES, **GPU_SUBSTITUTES, _ITEM: lambda tensor: _item(recorder, tensor)}
    fake_kernels = FakeKernels(substitutes, {**FIXES, **GPU_FIXES}) if fake else nullcontext()
    recorder.start("optimizer")
    with fake_kernels:
        fresh = init_optimizer_state(work.optimizer)
    second_step(work.optimizer)
    stored_since = watch_modules(work)
    compiled = compiled_modules(work)
    if after_another or (not fake and (compiled or device == "cuda")):  # compiling and loading kernels is no part of it
        with fake_kernels:
            _run_before(first, recorder)
    recorder.start("forward")
    owners = own_everything(recorder, work, stored_since())
    stored_since = watch_modules(work)
    with ExitStack() as stack:
        stack.enter_context(_no_garbage_collection())
        stack.enter_context(running_modules(recorder.modules, work.model, skip=compiled))
        stack.enter_context(watch_generator_states(recorder.note))
        if not fake:
            stack.enter_context(opaque_compiled_graphs(recorder, work.model, expected=bool(compiled)))
        stack.enter_context(watched(lambda *launch: _launch(recorder, *launch, fake=fake)))
        stack.enter_context(recorder.meter.step())
        stack.enter_context(fake_kernels)
        stack.enter_context(recorder)
        lists = saves and (fake or not is_compiled(work.loss))
        value = _recorded_step(work, recorder, owners, fresh, fake=fake, lists=lists)
    del value  # a plain loop holds the loss while it steps
    is_steady = not stored_since()
    modules = {path: type(module).__name__ for path, module in work.model.named_modules()}
    graph = recorder.graph(modules, device=device, notes=_notes(recorder.meter, fake, compiled, saves=saves))
    if saves and not lists:
        graph = replace(graph, saved=handed_on(graph))  # a program saves nothing by autograd's hooks
    for parameter in owners:
        parameter.grad = None
    return graph, is_steady


def _recorded_step(
    work: Workload, recorder: Recorder, owners: Owners, fresh: Sequence[Tensor], *, fake: bool, lists: bool
) -> Tensor:
    """Forward, backward and the optimizer's step; returns the loss, detached.

    ``fresh`` are parameters whose optimizer state was made for the trace, ``lists`` says whether to list saved tensors.
    """
    with recorder.saved_tensor_hooks if lists else nullcontext():
        losses = [work.compute_loss()]
    value = losses[0].detach()
    recorder.start("backward")
    with named_gradients(recorder, owners) as reached:
        _backward(losses, recorder)
    for tensor in state_tensors(work.optimizer, [p for p in fresh if p not in reached]):
        recorder.forget(tensor)  # an optimizer makes no state for a parameter that never gets a gradient
    if work.optimizer is not None:
        recorder.start("optimizer")
        with without_step_hooks(work.optimizer) if fake else nullcontext():  # a hook could keep a fake tensor
            work.optimizer.step()
    return value


def _run_before(work: Workload, recorder: Recorder) -> None:
    """Run a whole step without recording it."""
    _backward([work.compute_loss()], recorder)
    if work.optimizer is not None:
        with without_step_hooks(work.optimizer):
            work.optimizer.step()
    clear_gradients(work)


def _backward(losses: list[Tensor], recorder: Recorder) -> None:
    """Run backward by torch's engine, or by ours if torch lacks the device. Empties the list."""
    if losses[0].device.type == "cuda" and not torch.cuda.is_available():
        backward(losses.pop(), recorder.visit)
    else:
        torch.autograd.backward(losses.pop())


def _launch(
    recorder: Recorder, name: str, tensors: Sequence[Tensor | None], launch: Callable[[], None], *, fake: bool
) -> None:
    """Record a Triton kernel as an op that reads and writes these tensors. Fake tensors launch nothing."""
    touched: list[Any] = [tensor for tensor in tensors if tensor is not None]
    if fake and not any(isinstance(tensor, FakeTensor) for tensor in touched):
        launch()  # another thread's, for real
        return
    recorder.run_opaque(f"triton.{name}", touched, (lambda: None) if fake else launch)


def _item(recorder: Recorder, tensor: Tensor) -> float:
    """Answer ``.item()`` on a fake tensor: optimizers may read their step count; nothing else has a value."""
    if recorder.phase == "optimizer" or "value" in vars(tensor):  # which an optimizer may read in backward too
        return known_value(tensor)
    raise DataDependentOutputException(_ITEM)


def _meter(device: torch.device, aside: Sequence[Tensor], target: str, *, fake: bool) -> Meter:
    """Choose a meter. Gradients in ``aside`` exist, but would not in a plain step."""
    if fake:
        return NoMeter(1 if target == "cpu" else CudaMeter.granularity)
    if device.type == "cuda":
        return CudaMeter(device, aside)
    if device.type == "cpu":
        return CpuMeter() if profiler.can_start() else NoMeter()
    raise TraceError(f"lowtide does not measure on {device.type} devices", hint="Use a CPU or a CUDA device.")


def _notes(meter: Meter, fake: bool, compiled: set[int], *, saves: bool) -> tuple[str, ...]:
    notes: list[str] = []
    if isinstance(meter, NoMeter) and not fake:
        notes.append(
            "torch's CPU profiler could not start: another one runs, or lowtide does not know this version of torch. "
            "Kernels' own allocations and seconds were not measured."
        )
    if fake and compiled:
        notes.append("Compiled modules were predicted as eager ones.")
    if not saves:
        notes.append("The step differentiates by torch.func, which does not tell what it saves for backward.")
    return tuple(notes)


def _warn_of_survivors(recorder: Recorder, work: Workload, *, fake: bool) -> None:
    """Warn of tensors of the traced step that something beyond the step's own state still holds."""
    if all(storage() is None for _, storage in recorder.survivors):
        return
    gc.collect()  # it was off during the step
    own = set(map(storage_id, own_storages(work)))
    living = [(label, storage()) for label, storage in recorder.survivors]
    alive = [label for label, storage in living if storage is not None and storage_id(storage) not in own]
    if alive:
        kind = "fake tensors, without values" if fake else "tensors"
        warnings.warn(
            f"The traced step left {kind} outside of what lowtide restores: {', '.join(alive[:3])}. "
            "Look for objects, or variables of hooks and functions, that keep results or parameters",
            RuntimeWarning,
            stacklevel=2,
        )


@contextmanager
def _no_garbage_collection() -> Generator[None]:
    """Turn the garbage collector off, so that two traces of one step agree."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
