"""A step's loss captured by Dynamo as one joint graph, and the compiled loss that an engine runs."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, fx

from lowtide.batches import flatten
from lowtide.compat.dynamo import (
    METRICS,
    aot_autograd,
    cause_of,
    default_partition,
    dynamo_config,
    forget_compiled,
    forget_failed,
    has_own_gradients,
    make_boxed,
    silenced,
    traced_inputs,
    traced_metadata,
)
from lowtide.compat.frames import evaluate_frames_by_default
from lowtide.compat.modules import GLOBAL_HOOKS, in_ddp_forward
from lowtide.errors import TraceError
from lowtide.registry import NEEDS_NO_CAPTURE
from lowtide.tracing.capture.decompositions import plain_composites
from lowtide.tracing.capture.joint import Joint, Origin, origin_of
from lowtide.tracing.compiled import compiled_modules
from lowtide.tracing.fake.kernel_dispatch import replaced_kernels
from lowtide.tracing.fake.kernels import FIXES, SUBSTITUTES
from lowtide.tracing.plain_aten.gradient_accumulation import held_by_call
from lowtide.tracing.snapshot import unchanged
from lowtide.workload import Workload

J = TypeVar("J")


def capture_joint(work: Workload) -> Joint:
    """The joint graph of a step's loss, captured by Dynamo and AOTAutograd. Nothing runs, and nothing is changed.

    Raises ``TraceError`` where there is no one graph: the forward pass looks at values, or calls what Dynamo does not
    follow.
    """
    capture = capture_loss(work)
    capture.release()
    return capture.graph.joint


def capture_loss(work: Workload, run: Callable[[Joint, Sequence[Any]], None] | None = None) -> Capture:
    """Capture a step's loss as ``capture_joint`` does, for an engine to run.

    ``run``, if given, gets the joint graph and the tensors that the step would give it.
    """
    backend = _JointCollector(run)
    compiled = CompiledLoss(work, backend)
    try:
        with unchanged(work, fake=run is None):
            call_until_captured(compiled, work)
        if not backend.graphs:
            raise TraceError("The loss is not captured as one graph", hint=NEEDS_NO_CAPTURE)
    except BaseException:
        compiled.release()
        raise
    return Capture(work, compiled, backend)


def call_until_captured(compiled: CompiledLoss, work: Workload) -> None:
    """Call a compiled loss once. Its backend raises ``CapturedError`` when it has its graph."""
    refuse_uncapturable(work)
    try:
        compiled(work.batch)
    except Exception as error:
        cause = cause_of(error)
        if isinstance(cause, CapturedError):
            return
        what = next(iter(str(cause).splitlines()), type(cause).__name__)
        raise TraceError(f"The loss is not captured as one graph ({what})", hint=NEEDS_NO_CAPTURE) from error


class CapturedGraph:
    """A graph that Dynamo captured, and what runs in its place: ``run``, which an engine sets."""

    def __init__(self, joint: Joint, inputs: Sequence[Any], metadata: Any) -> None:
        self.joint = joint
        self.moved: tuple[int, ...] = () if metadata is None else tuple(metadata.mutated_inp_runtime_indices)
        self.is_plain = is_plain(len(joint.primals), len(joint.outputs), len(inputs), metadata)
        self.has_own_gradients = False
        self.run: Callable[..., Any] | None = None

    def __call__(self, *inputs: Any) -> Any:
        assert self.run is not None
        return self.run(*inputs)


def is_plain(primals: int, outputs: int, inputs: int, metadata: Any) -> bool:
    """Tell whether inputs are the graph's own, one output leaves, and nothing but values of buffers changes."""
    mutated = [metadata.input_info[i] for i in metadata.mutated_inp_runtime_indices] if metadata is not None else []
    return (
        metadata is not None
        and primals == inputs
        and len(metadata.output_info) == 1
        and outputs == len(mutated) + 1
        and not any(each.requires_grad or each.mutates_metadata for each in mutated)
    )


class Capture:
    """A loss that is captured as one graph, and which engine runs it. At most one has it at a time."""

    def __init__(self, work: Workload, loss: CompiledLoss, backend: _JointCollector) -> None:
        self.loss, self._backend = loss, backend
        self.key = call_key(work.batch)
        self.graph = backend.graphs[-1]
        self._is_free = self._is_shared = self.graph.is_plain and len(backend.graphs) == 1

    def take(self, key: Any) -> bool:
        """Give the captured loss to an engine, if it is free and such batches were captured."""
        taken = self._is_free and key == self.key
        self._is_free &= not taken
        return taken

    def run_by(self, run: Callable[..., Any], recapture: Callable[..., Any]) -> None:
        """Have the engine run the graph. Where Dynamo captures another one, ``recapture`` is its backend."""
        self.graph.run, self._backend.recapture = run, recapture

    def give_back(self) -> None:
        """Free the engine's program. Free the capture too if it is not shared, or if Dynamo captured other graphs."""
        if self._backend.is_recaptured or not self._is_shared:
            self.release()
        else:
            self.graph.run = self._backend.recapture = None
            self._is_free = True

    def end_sharing(self) -> None:
        """Let nobody take it any more; the engine that has it frees it."""
        self._is_shared = False
        if self._is_free:
            self.release()

    def release(self) -> None:
        """Free what Dynamo holds."""
        self._is_free = self._is_shared = False
        self.loss.release()


@contextmanager
def sharing_captures(work: Workload) -> Generator[None]:
    """Share captures of a step within one call of lowtide's.

    Dynamo's guards do not see all that changes a step, such as a method of a class. So no capture is shared longer.
    """
    captures = work.captures
    if captures.shared:
        yield
        return
    captures.shared = True
    try:
        yield
    finally:
        captures.shared, captures.refused = False, ""
        while captures.losses:
            captures.losses.pop().end_sharing()


def differentiated(
    captured: fx.GraphModule,
    inputs: Sequence[Any],
    joint_type: Callable[[fx.GraphModule, int, Sequence[Origin]], J],
    graphs_of: Callable[[J], tuple[fx.GraphModule, fx.GraphModule]] | None = None,
    *,
    code_of: Callable[[fx.GraphModule], Any] = make_boxed,
) -> tuple[Callable[..., Any], list[tuple[J, Any]]]:
    """A graph of Dynamo's with its backward pass, by AOTAutograd; and its joint graphs, each with their metadata.

    ``graphs_of`` cuts a joint graph into forward and backward; by default all that autograd keeps is kept. ``code_of``
    makes both run.
    """
    placeholders = captured.graph.find_nodes(op="placeholder")
    origins: list[Origin] = [origin_of(*each) for each in zip(placeholders, inputs, strict=False)]
    joints: list[J] = []
    metadata: list[Any] = []

    def partition(module: fx.GraphModule, given: Any, *, num_fwd_outputs: int, **_: Any) -> tuple[Any, Any]:
        graphs: Any = None if graphs_of else default_partition(module, given, num_fwd_outputs=num_fwd_outputs)
        joints.append(joint_type(module, num_fwd_outputs, origins))
        return graphs_of(joints[-1]) if graphs_of else graphs

    def compiler(graph: fx.GraphModule, _: Any) -> Any:
        metadata.append(traced_metadata())
        return code_of(graph)

    whole = aot_autograd(fw_compiler=compiler, bw_compiler=compiler, partition_fn=partition)(captured, inputs)
    return whole, list(zip(joints, metadata, strict=False))


class _JointCollector:
    """For Dynamo: collects joint graphs, until an engine says what to do with the next ones.

    Dynamo holds it until it is released. So it does not hold the step: ``run`` is dropped once it was called.
    """

    def __init__(self, run: Callable[[Joint, Sequence[Any]], None] | None = None) -> None:
        self.graphs: list[CapturedGraph] = []
        self.recapture: Callable[..., Any] | None = None
        self.is_recaptured = False
        self._runs = [] if run is None else [run]

    def __call__(self, captured: fx.GraphModule, inputs: Any) -> Any:
        if self.recapture is not None:
            self.is_recaptured = True
            return self.recapture(captured, inputs)
        whole, joints = differentiated(captured, inputs, Joint, code_of=lambda _: make_boxed(self._stop))
        if not joints:
            return whole
        joint, metadata = joints[0]
        self.graphs.append(CapturedGraph(joint, inputs, metadata))
        self.graphs[-1].run = whole
        self.graphs[-1].has_own_gradients = has_own_gradients(captured)
        return self.graphs[-1]

    def _stop(self, *inputs: Any) -> Any:
        while self._runs:
            self._runs.pop()(self.graphs[-1].joint, inputs)
        raise CapturedError


def refuse_uncapturable(work: Workload) -> None:
    """Raise ``TraceError`` for models that Dynamo would capture as something else."""
    if work.device.type == "meta":
        raise TraceError("A model on the meta device is not captured", hint="Build it on its device.")
    if compiled_modules(work):
        raise TraceError("The model is compiled, and a captured graph would not run what the compiler made of it")


class CompiledLoss:
    """The loss as a function of the batch, captured as one graph for a backend of Dynamo's.

    Dynamo holds captures for good. This frees its own when it is collected, or by ``release()``.
    """

    def __init__(self, work: Workload, backend: Callable[..., Any]) -> None:
        def loss(batch: Any) -> Tensor:
            return work.compute_loss(batch=batch)

        inputs: list[Any] = []

        def noting(captured: fx.GraphModule, given: Any) -> Any:
            inputs.append(traced_inputs())
            return backend(captured, given)

        # Dynamo counts compilations by code object, and refuses the ninth: each loss here gets one of its own.
        self._code, self._backend, self._inputs = loss.__code__.replace(), noting, inputs
        own = FunctionType(self._code, loss.__globals__, "loss", closure=loss.__closure__)
        self._compiled: Callable[[Any], Tensor] | None = torch.compile(
            own, backend=noting, dynamic=False, fullgraph=True
        )
        weakref.finalize(self, forget_compiled, self._code, noting).atexit = False

    def __call__(self, batch: Any) -> Tensor:
        assert self._compiled is not None
        held = held_by_call()
        try:
            with (
                replaced_kernels(SUBSTITUTES, FIXES),
                plain_composites,
                dynamo_config().patch(_settings()),
                silenced(METRICS),
            ):
                return self._compiled(batch)
        except Exception as error:
            forget_failed(error)
            raise
        finally:
            while self._inputs:  # in a cycle with their mode, which is never collected where one is a view
                self._inputs.pop().clear()
            if held_by_call() > held:  # Dynamo failed, now or earlier, and has left its evaluator behind
                evaluate_frames_by_default()

    def release(self) -> None:
        """Free the captured graphs; it cannot be called any more."""
        self._compiled = None
        forget_compiled(self._code, self._backend)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()


def _settings() -> dict[str, Any]:
    """Settings of Dynamo that differ from its defaults.

    It would not look whether a module has got a hook since, to save 1.5 µs for each module. Inside a DDP module's
    forward it would cut graphs at DDP's buckets; gradients leave early without that. It would not capture logging.
    """
    settings: dict[str, Any] = {"skip_nnmodule_hook_guards": False}
    if in_ddp_forward():
        settings["optimize_ddp"] = False
    words = {"debug", "info", "warn", "warning", "error", "exception", "critical", "fatal", "log", "isEnabledFor"}
    methods = (each for name, each in vars(logging.Logger).items() if name.split("_")[0] in words)  # warning_once too
    functions = (vars(logging)[name] for name in words & vars(logging).keys())
    now = dynamo_config()
    name = "ignore_logging_functions" if hasattr(now, "ignore_logging_functions") else "ignore_logger_methods"
    return {**settings, name: {*methods, *functions, *getattr(now, name)}}


_cuda = torch.backends.cuda
_ATTENTION = (  # kinds that may run, on a CPU too; Dynamo's guards do not see them
    _cuda.flash_sdp_enabled, _cuda.mem_efficient_sdp_enabled, _cuda.math_sdp_enabled, _cuda.cudnn_sdp_enabled,
)  # fmt: skip


def call_key(batch: Any) -> Any:
    """Name what a loss is captured for: structure and shapes of the batch, hooks of all modules, kinds of attention.

    Values that are not tensors are Dynamo's to look at.
    """
    leaves, structure = flatten(batch)
    shapes = tuple((tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else type(leaf) for leaf in leaves)
    attention = tuple(is_enabled() for is_enabled in _ATTENTION)
    return (str(structure), shapes, attention, *map(len, GLOBAL_HOOKS))


class CapturedError(Exception):
    """Stop a step whose graph was captured."""
