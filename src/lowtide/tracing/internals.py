"""What tracing needs of torch that has no public door, in one place. Checked on torch 2.11 and 2.13."""

from __future__ import annotations

import ctypes
import weakref
from types import CodeType
from typing import Any

import torch
from torch import Tensor

autograd: Any = vars(torch._C)["_autograd"]  # saved-tensor hooks, sequence numbers, version counters, the profiler


def gradient_hooks(parameter: Tensor) -> dict[int, Any]:
    """The hooks that run after a parameter's gradient was accumulated, in their order."""
    return getattr(parameter, "_post_accumulate_grad_hooks", None) or {}


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
    from torch._dynamo import eval_frame

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
