"""Dynamo, AOTAutograd and Inductor. Importing this imports none of them, which would take a second."""

from __future__ import annotations

import importlib
import logging
import re
import sys
import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import CodeType
from typing import Any, TypeVar

import torch
from torch import fx, nn

from lowtide.compat.operators import HigherOrderOperator
from lowtide.compat.versions import CAPTURE, TRIED

_Function = TypeVar("_Function", bound=Callable[..., Any])

METRICS = "torch._dynamo.metrics_context"
"""The logger of Dynamo's metrics: torch 2.11 fails to log settings that hold functions."""

AOT_AUTOGRAD = "torch._functorch._aot_autograd"
"""The package whose frames run compiled graphs."""


_disable: Any = TRIED.find("torch._compile:_disable_dynamo", torch.compiler.disable)


def disable_dynamo(function: _Function) -> _Function:
    """Have compiled code run a function eagerly; ``torch.compiler.disable`` would import Dynamo."""
    return _disable(function)


def assume_constant_result(function: _Function) -> _Function:
    """Do as ``torch.compiler.assume_constant_result``, which imports Dynamo.

    Where Dynamo is imported already, torch's own is used. Under another mark Dynamo would break the graph there.
    """
    if "torch._dynamo" in sys.modules:
        return torch.compiler.assume_constant_result(function)
    vars(function)["_dynamo_marked_constant"] = True
    return function


@TRIED
def skip_code(code: CodeType) -> None:
    """Have Dynamo leave frames of a code object to Python."""
    importlib.import_module("torch._dynamo.eval_frame").skip_code(code)


@CAPTURE
def aot_autograd(**compilers: Any) -> Callable[..., Any]:
    """Make a backend of Dynamo's that traces forward and backward and hands both to ``compilers``."""
    return importlib.import_module("torch._dynamo.backends.common").aot_autograd(**compilers)


@CAPTURE
def default_partition(joint: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int) -> tuple[Any, Any]:
    """Cut a joint graph into forward and backward, keeping what autograd keeps."""
    partitioners = importlib.import_module("torch._functorch.partitioners")
    return partitioners.default_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs)


@CAPTURE
def make_boxed(function: Callable[..., Any]) -> Any:
    """Wrap a function so that it takes its arguments in one list."""
    return importlib.import_module("torch._functorch._aot_autograd.utils").make_boxed_func(function)


def mark_boxed(function: Any) -> None:
    """Tell AOTAutograd that a function takes its arguments in one list, and empties it."""
    function._boxed_call = True


@CAPTURE
def dynamo_config() -> Any:
    """Return Dynamo's settings; ``.patch(settings)`` changes some inside a block."""
    return importlib.import_module("torch._dynamo").config


ARRAY = "a numpy array"
"""The source of inputs that were numpy's."""


def source_of(placeholder: fx.Node) -> str:
    """Name the local variable in or under which Dynamo found an input of its graph, ``ARRAY``, or ""."""
    source: Any = getattr(placeholder, "_dynamo_source", None)
    if type(source).__name__ == "NumpyTensorSource":
        return ARRAY
    while hasattr(source, "base"):
        source = source.base
    return getattr(source, "local_name", "")


def is_tangent(placeholder: fx.Node) -> bool:
    """Tell whether an input of AOTAutograd's joint graph is the gradient of an output."""
    return placeholder.name.startswith("tangents")


def module_path(node: fx.Node) -> str:
    """Return the path of the module that ran an op, or whose backward an op belongs to: ``L.work.model.blocks.0``."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    path, _ = next(reversed(stack.values()), ("", None))  # L['work'].model, with [0] or ._modules['0'] for children
    return re.sub(r"\._modules|\[['\"]?(\w+)['\"]?\]", lambda match: f".{match[1]}" if match[1] else "", path)


def inputs_written(graph: fx.Graph) -> list[fx.Node | None]:
    """By output of AOTAutograd's graph, the input whose new value it is, or None."""
    (output,) = graph.find_nodes(op="output")
    inputs = {node.meta.get("desc"): node for node in graph.find_nodes(op="placeholder")}
    written = [getattr(each, "mutated_input", None) for each in output.meta.get("desc", ())]
    return [None if each is None else inputs.get(each) for each in written]


def place_of_result(graph: fx.Graph, outputs: int) -> int:
    """Find the function's own result among the first outputs of AOTAutograd's graph; the last one if none is marked."""
    (output,) = graph.find_nodes(op="output")
    places = [getattr(each, "idx", None) for each in output.meta.get("desc", ())[:outputs]]
    return places.index(0) if 0 in places else outputs - 1


def has_own_gradients(captured: fx.GraphModule) -> bool:
    """Tell whether Dynamo's graph has a custom ``autograd.Function``, or a hook on a gradient."""
    modules = (module for module in captured.modules() if isinstance(module, fx.GraphModule))
    targets = (node.target for module in modules for node in module.graph.nodes)
    named = {each.name() if isinstance(each, HigherOrderOperator) else each for each in targets}
    return not {"autograd_function_apply", "register_hook"}.isdisjoint(named)  # a hook is a method in torch 2.11


def cause_of(error: BaseException) -> BaseException:
    """Return the error of a backend or an op behind Dynamo's error, or the error itself."""
    return getattr(error, "inner_exception", None) or error


def is_uncaptured(error: BaseException) -> bool:
    """Tell whether Dynamo raised an error because it cannot capture the code."""
    return type(error).__name__ in ("Unsupported", "UserError", "TorchRuntimeError")


def is_recaptured_too_often(error: BaseException) -> bool:
    """Tell whether Dynamo raised an error because it captured the code as often as its settings allow."""
    return type(error).__name__ == "FailOnRecompileLimitHit"


@CAPTURE
def traced_metadata() -> Any:
    """Return what AOTAutograd knows of the graph that it compiles: its inputs, and which of them are written."""
    return _tracing_context().get().fw_metadata


@CAPTURE
def traced_inputs() -> list[Any]:
    """Return the fake inputs of the graph that Dynamo compiles; of use to it until the guards are made."""
    mode = _tracing_context().get().fake_mode
    fakes = mode.shape_env.tracked_fakes if mode is not None and mode.shape_env is not None else None
    return [] if fakes is None else fakes


def forget_compiled(code: CodeType, backend: object) -> None:
    """Free what Dynamo compiled for one code object, and its backend; ``torch._dynamo.reset`` would free everybody's.

    Dynamo holds both for good: graphs, their fake tensors and the guards.
    """
    eval_frame: Any = importlib.import_module("torch._dynamo.eval_frame")
    guards = {id(entry.guard_manager) for entry in eval_frame._debug_get_cache_entry_list(code)}
    registered: Any = vars(weakref.finalize).get("_registry", {})
    for each in list(registered):  # on the types and functions that guards are about, which live on
        watched = each.peek()
        checks = getattr(getattr(watched and watched[1], "func", None), "__self__", None)
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


def compiled_module(module: nn.Module) -> nn.Module | None:
    """Return the module that ``torch.compile`` wrapped in this one, or None."""
    dynamo = sys.modules.get("torch._dynamo")
    is_wrapper = dynamo is not None and isinstance(module, dynamo.OptimizedModule)
    return module.get_submodule("_orig_mod") if is_wrapper else None


def inductor_graph(*, imports: bool) -> Any:
    """Return the class of the graphs that Inductor compiles; None where it is not imported, and may not be."""
    name = "torch._inductor.output_code"
    return importlib.import_module(name).CompiledFxGraph if imports or name in sys.modules else None


@contextmanager
def silenced(logger: str) -> Generator[None]:
    """Silence one of torch's loggers, whose errors reach the user in another way or mean nothing."""
    log = logging.getLogger(logger)
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _tracing_context() -> Any:
    return importlib.import_module("torch._guards").TracingContext
