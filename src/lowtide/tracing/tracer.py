"""Run a step to trace it, real or fake, and restore everything."""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lowtide.batches import with_own_containers
from lowtide.compat.autograd import gradient_hooks
from lowtide.compat.dynamo import silenced
from lowtide.compat.fake import (
    FAKE_KERNELS,
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from lowtide.compat.modules import own_parameters
from lowtide.compat.optimizers import all_step_hooks
from lowtide.errors import LowtideError, TraceError, WorkloadError
from lowtide.kernels.launches import watched
from lowtide.tracing.call_sites import module_hooks
from lowtide.tracing.compiled import compiled_modules, is_compiled, opaque_compiled_graphs
from lowtide.tracing.fake.backward import backward
from lowtide.tracing.fake.gpu import ANSWERS, GPU_FIXES, emulated_gpu
from lowtide.tracing.fake.kernel_dispatch import Answers
from lowtide.tracing.fake.kernels import FIXES, SUBSTITUTES
from lowtide.tracing.fake.workload import fake_workload, known_value, second_step
from lowtide.tracing.graph import Graph, handed_on
from lowtide.tracing.meter import CpuMeter, CudaMeter, Meter, NoMeter, profiler_is_free
from lowtide.tracing.op_calls import Call
from lowtide.tracing.other_tensors import OtherTensors
from lowtide.tracing.recorder import Recorder
from lowtide.tracing.snapshot.held_tensors import (
    clear_gradients,
    kept_tensors,
    modules_of,
    optimizers_of,
    parameters_of,
    state_tensors,
    watch_modules,
)
from lowtide.tracing.snapshot.unchanged import unchanged
from lowtide.workload import Workload

_ITEM = torch.ops.aten._local_scalar_dense.default
_NO_HOOKS = "support saved tensor hooks"  # what torch.func's gradients say of them


def trace(
    work: Workload, *, fake: bool = False, device: str | None = None, calls: dict[str, Call] | None = None
) -> Graph:
    """Trace one training step: zero_grad, forward, backward, optimizer.

    The step is the steady one. Gradients start as None. Optimizer state exists, and so do tensors that modules hold
    from earlier steps. A real step runs on the model's own device. A fake one allocates and computes nothing, and can
    be of another ``device`` ("cpu", "cuda", or a name of the device table such as "h200"). Parameters, gradients,
    buffers, optimizer state and random generators are restored bit for bit. ``calls``, if given, is filled with one
    call for each distinct signature.
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
        if _NO_HOOKS not in str(error):
            raise
    return _trace(work, target, calls, fake=fake, saves=False)


def _trace(work: Workload, target: str, calls: dict[str, Call] | None, *, fake: bool, saves: bool) -> Graph:
    gradients = _held_gradients(work) if work.device.type == "cuda" else []
    for after_another in (False, True):
        if calls is not None:
            calls.clear()
        with unchanged(work, fake=fake):
            if fake:
                graph, is_steady = _trace_fake(work, target, calls, saves=saves, after_another=after_another)
            else:
                meter = _meter(work.device, gradients)
                graph, is_steady = _run(
                    work, meter, target, calls, saves=saves, after_another=after_another, aside=gradients
                )
        if is_steady:
            break
    return graph


def _held_gradients(work: Workload) -> list[Tensor]:
    """Gradients that exist before the step: they are set aside, and stay allocated."""
    return [p.grad for p in parameters_of(work) if p.grad is not None]


def _trace_fake(
    work: Workload, target: str, calls: dict[str, Call] | None, *, saves: bool, after_another: bool
) -> tuple[Graph, bool]:
    tensor_device = torch.device("cpu" if target == "cpu" else "cuda")
    # An op without a fake kernel runs for real, on zeros: where it cannot, it is to be named.
    is_here = tensor_device.type == "cpu" or torch.cuda.is_available()
    mode = FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=is_here)
    try:
        with ExitStack() as stack:
            if tensor_device.type == "cuda":
                stack.enter_context(emulated_gpu())
            stack.enter_context(silenced(FAKE_KERNELS))
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            fake = stack.enter_context(fake_workload(work, mode, tensor_device))
            stack.enter_context(mode)
            meter = NoMeter(512 if tensor_device.type == "cuda" else 1)
            return _run(fake, meter, target, calls, fake=True, saves=saves, after_another=after_another)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise TraceError(
            f"The step looks at a tensor's values ({error})", hint="Profile a real step: leave out fake=True."
        ) from error
    except LowtideError:
        raise
    except RuntimeError as error:  # torch's own: an op without a fake kernel, or one that a fake tensor trips
        hint = "If it runs on real ones, profile that: leave out fake=True."
        if "devices" in str(error):
            hint = "Make tensors that are neither in the model nor in the batch on the device of the input."
        what = next(iter(str(error).splitlines()), "")
        raise TraceError(f"The step does not run on fake tensors ({what})", hint=hint) from error


def _run(
    work: Workload,
    meter: Meter,
    device: str,
    calls: dict[str, Call] | None,
    *,
    saves: bool,
    after_another: bool,
    fake: bool = False,
    aside: Sequence[Tensor] = (),
) -> tuple[Graph, bool]:
    """Run one step under the recorder. Also tell whether it is steady: modules hold the same tensors after.

    ``saves`` says whether to list what is saved for backward, ``after_another`` to run another step before. A plain
    step has no tensors set ``aside``.
    """
    first, work = (replace(work, batch=with_own_containers(work.batch)) for _ in range(2))
    recorder = Recorder(meter, calls=calls, fake=fake)
    answers = {**SUBSTITUTES, **ANSWERS, _ITEM: lambda tensor: _item(recorder, tensor)}
    fake_kernels = Answers(answers, {**FIXES, **GPU_FIXES}) if fake else nullcontext()
    recorder.start("optimizer")
    with fake_kernels:
        fresh = _init_optimizer_state(work)
    second_step(work.optimizer)
    kept_since = watch_modules(work)
    compiled = compiled_modules(work)
    if after_another or (compiled and not fake):  # compiling is not part of the step
        with fake_kernels:
            _run_before(first, recorder)
    recorder.start("forward")
    owners = _own_everything(recorder, work, kept_since())
    kept_since = watch_modules(work)
    if not fake and _counts_whole_process(work.device):
        recorder.set_apart(OtherTensors(work.device, aside, granularity=meter.granularity))
    modules: dict[str, str] = {}
    with ExitStack() as stack:
        stack.enter_context(_no_garbage_collection())
        modules, handles = module_hooks(recorder.modules, work.model, skip=compiled)
        for handle in handles:
            stack.callback(handle.remove)
        stack.enter_context(_noted_generator_states(recorder))
        if not fake:
            stack.enter_context(opaque_compiled_graphs(recorder, work.model, expected=bool(compiled)))
        stack.enter_context(watched(lambda *launch: _launch(recorder, *launch, fake=fake)))
        stack.enter_context(meter.step())
        stack.enter_context(fake_kernels)
        stack.enter_context(recorder)
        lists = saves and (fake or not is_compiled(work.loss))
        value = _recorded_step(work, recorder, owners, fresh, fake=fake, lists=lists)
    del value  # a plain loop holds the loss while it steps
    is_steady = not kept_since()
    graph = recorder.graph(modules, device=device, fake=fake, notes=_notes(meter, fake, compiled, saves=saves))
    if saves and not lists:
        graph = replace(graph, saved=handed_on(graph))  # a program saves nothing by autograd's hooks
    for parameter in owners:
        parameter.grad = None
    return graph, is_steady


def _recorded_step(
    work: Workload,
    recorder: Recorder,
    owners: dict[Tensor, tuple[str, str]],
    fresh: Sequence[Tensor],
    *,
    fake: bool,
    lists: bool,
) -> Tensor:
    """Forward, backward and the optimizer's step; returns the loss, detached.

    ``fresh`` are parameters whose optimizer state was made for the trace, ``lists`` says whether to list saved tensors.
    """
    with recorder.saved_tensor_hooks if lists else nullcontext():
        losses = [work.compute_loss()]
    value = losses[0].detach()
    recorder.start("backward")
    with _noted_gradients(recorder, owners) as reached:
        _backward(losses, recorder)
    for parameter, (name, module) in owners.items():
        if parameter.grad is not None:
            recorder.label(parameter.grad, "gradient", f"{name}.grad", module)
            reached.add(parameter)
    for tensor in state_tensors(work.optimizer, [p for p in fresh if p not in reached]):
        recorder.forget(tensor)  # an optimizer makes no state for a parameter that never gets a gradient
    if work.optimizer is not None:
        recorder.start("optimizer")
        with _without_step_hooks(work.optimizer) if fake else nullcontext():  # a hook could keep a fake tensor
            work.optimizer.step()
    return value


def _run_before(work: Workload, recorder: Recorder) -> None:
    """Run a whole step without recording it."""
    _backward([work.compute_loss()], recorder)
    if work.optimizer is not None:
        with _without_step_hooks(work.optimizer):
            work.optimizer.step()
    clear_gradients(work)


def _backward(losses: list[Tensor], recorder: Recorder) -> None:
    """Run backward by torch's engine, or by ours if torch lacks the device. Empties the list."""
    if losses[0].device.type == "cuda" and not torch.cuda.is_available():
        backward(losses.pop(), recorder.visit)
    else:
        torch.autograd.backward(losses.pop())


@contextmanager
def _noted_gradients(recorder: Recorder, owners: dict[Tensor, tuple[str, str]]) -> Generator[set[Tensor]]:
    """Name gradients that hooks may free before backward ends. Yields the parameters that got one."""
    reached: set[Tensor] = set()

    def note(parameter: Tensor) -> None:
        reached.add(parameter)
        name, module = owners[parameter]
        if parameter.grad is not None:
            recorder.label(parameter.grad, "gradient", f"{name}.grad", module)

    with ExitStack() as stack:
        for parameter in owners:
            hooks: Any = gradient_hooks(parameter)
            if hooks:
                others = dict(hooks)
                hooks.clear()  # and not moved to the end: the engine goes by the order in which they were put there
                handle = parameter.register_post_accumulate_grad_hook(note)
                hooks.update(others)
                stack.callback(handle.remove)
        yield reached


def _launch(
    recorder: Recorder, name: str, tensors: Sequence[Tensor | None], launch: Callable[[], None], *, fake: bool
) -> None:
    """Record a Triton kernel as an op that reads and writes these tensors. Fake tensors launch nothing."""
    touched: list[Any] = [tensor for tensor in tensors if tensor is not None]
    if fake and not any(isinstance(tensor, FakeTensor) for tensor in touched):
        launch()  # another thread's, for real
        return
    recorder.run_opaque(f"triton.{name}", touched, (lambda: None) if fake else launch)


def _own_everything(
    recorder: Recorder, work: Workload, kept: Sequence[tuple[str, Tensor]]
) -> dict[Tensor, tuple[str, str]]:
    """Register tensors from before the step, and those that modules ``kept`` from another, each with a name.

    Returns the parameters with their names and modules.
    """
    owners: dict[Tensor, tuple[str, str]] = {}
    for name, parameter in work.model.named_parameters():
        module = name.rpartition(".")[0]
        owners[parameter] = (name, module)
        recorder.own(parameter, "parameter", name, module)
    for name, buffer in work.model.named_buffers():
        recorder.own(buffer, "buffer", name, name.rpartition(".")[0])
    for module in modules_of(work):  # those that the loss holds: a teacher, a criterion
        for name, parameter in own_parameters(module).items():
            if parameter is not None:
                recorder.own(parameter, "buffer", f"{type(module).__name__}.{name} of the loss")
    if work.optimizer is not None:
        _own_optimizer(recorder, work.optimizer, owners)
    for name, tensor in kept_tensors(work, depth=1):
        if tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested:
            recorder.own(tensor, "buffer", name)
    for name, tensor in kept:
        recorder.own(tensor, "buffer", name)
    for tensor in work.tensors():
        recorder.own(tensor, "input", f"batch {list(tensor.shape)}")
    return owners


def _own_optimizer(recorder: Recorder, optimizer: torch.optim.Optimizer, owners: dict[Tensor, tuple[str, str]]) -> None:
    """Register an optimizer's state and parameters; those outside of the model join ``owners``."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            owners.setdefault(parameter, ("parameter outside of the model", ""))
            recorder.own(parameter, "parameter", *owners[parameter])
    for parameter, state in optimizer.state.items():
        name, module = owners.get(parameter, ("", ""))
        for key, value in state.items():
            if isinstance(value, Tensor):
                recorder.own(value, "optimizer state", f"{name}.{key}", module, state_key=key)


def _init_optimizer_state(work: Workload) -> list[Tensor]:
    """Give the optimizer the state it has in every step but the first: one step on zero gradients.

    Returns the parameters that had none.
    """
    if work.optimizer is None:
        return []
    fresh = [
        p
        for group in work.optimizer.param_groups
        for p in group["params"]
        if p.requires_grad and p not in work.optimizer.state
    ]
    if not fresh:
        return []
    with torch.no_grad():
        for parameter in fresh:
            parameter.grad = _zero_gradient(parameter, work.optimizer)
        with _without_step_hooks(work.optimizer):
            work.optimizer.step()
    for parameter in fresh:
        parameter.grad = None
    return fresh


def _zero_gradient(parameter: Tensor, optimizer: torch.optim.Optimizer) -> Tensor:
    if not isinstance(optimizer, torch.optim.SparseAdam):
        return torch.zeros_like(parameter)
    indices = torch.zeros(1, 1, dtype=torch.int64, device=parameter.device)
    values = torch.zeros(1, *parameter.shape[1:], dtype=parameter.dtype, device=parameter.device)
    return torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False)


@contextmanager
def _without_step_hooks(optimizer: torch.optim.Optimizer) -> Generator[None]:
    """Disable the user's optimizer hooks for a step that is not the user's; keep lowtide's own."""
    hooks = [(held, dict(held)) for held in all_step_hooks(optimizers_of(optimizer))]
    for held, content in hooks:
        held.clear()
        held.update({key: hook for key, hook in content.items() if _is_part_of_step(hook)})
    try:
        yield
    finally:
        for held, content in hooks:
            held.clear()
            held.update(content)


def _is_part_of_step(hook: Any) -> bool:
    return getattr(getattr(hook, "__self__", None), "part_of_step", False)


def _item(recorder: Recorder, tensor: Tensor) -> float:
    """``.item()`` on a fake tensor: optimizers may read their step count; nothing else has a value."""
    if recorder.phase == "optimizer" or "value" in vars(tensor):  # which an optimizer may read in backward too
        return known_value(tensor)
    raise DataDependentOutputException(_ITEM)


def _meter(device: torch.device, aside: Sequence[Tensor]) -> Meter:
    if device.type == "cuda":
        return CudaMeter(device, ignored_bytes=sum(-(-tensor.nbytes // 512) * 512 for tensor in aside))
    if device.type == "cpu":
        return CpuMeter() if profiler_is_free() else NoMeter()
    raise TraceError(f"lowtide does not measure on {device.type} devices", hint="Use a CPU or a CUDA device.")


def _counts_whole_process(device: torch.device) -> bool:
    """Whether the meter reads an allocator's counters, and not the step's own events."""
    return device.type == "cuda"


def _notes(meter: Meter, fake: bool, compiled: set[int], *, saves: bool) -> tuple[str, ...]:
    notes: list[str] = []
    if isinstance(meter, NoMeter) and not fake:
        notes.append("Another profiler was running: kernels' own allocations and seconds were not measured.")
    if fake and compiled:
        notes.append("Compiled modules were predicted as eager ones.")
    if not saves:
        notes.append("The step differentiates by torch.func, which does not tell what it saves for backward.")
    return tuple(notes)


@contextmanager
def _noted_generator_states(recorder: Recorder) -> Generator[None]:
    """Count generator states that checkpoints keep; no op makes them, so the getter is watched."""
    original = torch.get_rng_state

    def get_rng_state() -> Tensor:
        return recorder.note(original(), "generator state")

    torch.get_rng_state = get_rng_state
    try:
        yield
    finally:
        torch.get_rng_state = original


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
