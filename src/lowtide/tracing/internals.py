"""What tracing needs of torch that has no public door, in one place. Checked on torch 2.11 and 2.13."""

from __future__ import annotations

import ctypes
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from functools import wraps
from types import CellType, CodeType
from typing import Any, TypeVar

import torch
from torch import Tensor

_Function = TypeVar("_Function", bound=Callable[..., Any])

autograd: Any = vars(torch._C)["_autograd"]  # saved-tensor hooks, sequence numbers, version counters, the profiler


CONSTANT = "_dynamo_marked_constant"  # of a function: Dynamo runs it while it traces, and takes its result as it is
RESTORED = "_lowtide_restored"  # of a buffer's copy: it holds what the first run of a recomputed part found


class _Thread(threading.local):
    runs_backward = False  # by ``tracing.backward``


_thread = _Thread()


def in_backward() -> bool:
    """Whether a backward pass runs in this thread: a module's forward is then a checkpoint's recomputation."""
    if torch.compiler.is_compiling():
        return False
    return _thread.runs_backward or torch._C._current_graph_task_id() != -1


@contextmanager
def backward_in_python() -> Generator[None]:
    """Have ``in_backward`` know of a backward pass that is not the engine's."""
    _thread.runs_backward = True
    try:
        yield
    finally:
        _thread.runs_backward = False


def gradient_hooks(parameter: Tensor) -> dict[int, Any]:
    """The hooks that run after a parameter's gradient was accumulated, in their order."""
    return getattr(parameter, "_post_accumulate_grad_hooks", None) or {}


def assume_constant_result(function: _Function) -> _Function:
    """As ``torch.compiler.assume_constant_result``, which imports Dynamo.

    Where Dynamo is there already, torch's own is used. Under another mark Dynamo would break the graph there.
    """
    if "torch._dynamo" in sys.modules:
        return torch.compiler.assume_constant_result(function)
    setattr(function, CONSTANT, True)
    return function


_CLIPPING = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_")  # of torch.nn.utils


def watch_clipping(see: Callable[[Iterable[Tensor]], None]) -> Callable[[], None]:
    """Call ``see`` with the parameters that torch clips, however a loop imported that; the result ends it.

    Each function of torch's wraps another one in a closure, which is replaced there. Without such a closure, as another
    version of torch may have it, nothing is seen.
    """
    watched: list[tuple[CellType, Any, Any]] = []
    for name in _CLIPPING:
        clip: Any = getattr(torch.nn.utils, name, None)
        inner: Any = getattr(clip, "__wrapped__", None)
        for cell in getattr(clip, "__closure__", None) or ():
            if inner is not None and cell.cell_contents is inner:
                cell.cell_contents = seen = _seen_by(see, inner)
                watched.append((cell, inner, seen))

    def restore() -> None:
        for cell, inner, seen in watched:
            if cell.cell_contents is seen:  # nobody replaced it since
                cell.cell_contents = inner

    return restore


def _seen_by(see: Callable[[Iterable[Tensor]], None], clip: Any) -> Any:
    @wraps(clip)
    def seen(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        see(listed)
        return clip(listed or parameters, *args, **kwargs)  # torch warns of an empty generator

    return seen


def evaluate_frames_by_default() -> None:
    """Have Python evaluate its own frames again.

    Once it has failed, Dynamo leaves its evaluator in place. Calls then hold their arguments until they return, so that
    every later step of the process, compiled or not, takes more memory. It is put in place anew when Dynamo next runs.
    """
    api = ctypes.pythonapi
    try:
        interpreter, use = api.PyInterpreterState_Get, api._PyInterpreterState_SetEvalFrameFunc
        default = ctypes.cast(api._PyEval_EvalFrameDefault, ctypes.c_void_p)
    except AttributeError:  # another Python: steps only take a little more
        return
    interpreter.restype = ctypes.c_void_p
    use.argtypes, use.restype = [ctypes.c_void_p, ctypes.c_void_p], None
    use(interpreter(), default)


def forget_compiled(code: CodeType, backend: object) -> None:
    """Free what Dynamo compiled for one code object, and its backend; ``torch._dynamo.reset`` would free everybody's.

    Dynamo holds both for good: graphs, their fake tensors and the guards.
    """
    from torch._dynamo import eval_frame as dynamo

    eval_frame: Any = dynamo
    guards = {id(entry.guard_manager) for entry in eval_frame._debug_get_cache_entry_list(code)}
    registered: Any = vars(weakref.finalize).get("_registry", {})
    for each in list(registered):  # on the types and functions that guards are about, which live on
        found = each.peek()
        checks = getattr(getattr(found and found[1], "func", None), "__self__", None)
        if id(getattr(checks, "guard_manager", None)) in guards:
            each.detach()
    eval_frame.reset_code(code)
    held = eval_frame.cached_backends
    for key in [key for key, each in held.items() if getattr(each, "compiler_fn", each) is backend]:
        del held[key]


def forget_failed(error: Exception) -> None:
    """Free what Dynamo traced before it failed: the graph, and fake inputs in a cycle that is never collected."""
    clean_up = getattr(getattr(error, "_torch_dynamo_tracer_output", None), "_cleanup_output_graph", None)
    if clean_up is not None:
        clean_up()


def traced_inputs() -> list[Any]:
    """The fake inputs of the graph that Dynamo compiles now; of use to it until the guards are made."""
    from torch._guards import TracingContext

    mode = TracingContext.get().fake_mode
    fakes = mode.shape_env.tracked_fakes if mode is not None and mode.shape_env is not None else None
    return [] if fakes is None else fakes


FAKE_KERNELS = "torch._subclasses.fake_tensor"  # logs the stack of a failing kernel before it raises
METRICS = "torch._dynamo.metrics_context"  # torch 2.11 fails to log settings that hold functions


@contextmanager
def silenced(logger: str) -> Generator[None]:
    """Silence one of torch's loggers, whose errors reach the user in another way or mean nothing."""
    log = logging.getLogger(logger)
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before
