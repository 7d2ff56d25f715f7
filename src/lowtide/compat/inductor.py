"""Inductor: one graph of ATen ops in, compiled code out. Importing this does not import Inductor."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx

from lowtide.compat.versions import Feature
from lowtide.errors import PlanError

_INDUCTOR = Feature("compiling regions", error=PlanError)
_TOGETHER = threading.RLock()  # of the one block that replaces Inductor's wait


@_INDUCTOR
def compile_graph(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[[list[Any]], Sequence[Any]]:
    """Compile a functional graph for fake inputs of these shapes and strides.

    The code takes its arguments in a list and empties it. Results have the strides that the graph gives them.
    ``torch.compile`` would trace again, and add its own runtime around each graph.
    """
    compile_fx = importlib.import_module("torch._inductor.compile_fx")
    passes = importlib.import_module("torch._inductor.fx_passes.joint_graph")
    device = next((value.device for value in inputs if isinstance(value, Tensor)), torch.device("cpu"))
    with _compiling(inputs), torch.no_grad():
        module = passes.joint_graph_passes(module, device)
        (outcome,) = module.graph.find_nodes(op="output")
        outcome.meta["user_visible_output_idxs"] = list(range(len(outcome.args[0])))
        return compile_fx.compile_fx_inner(module, list(inputs), is_inference=True)


@contextmanager
def compiled_together() -> Generator[None]:
    """Wait for the kernels of all graphs that are compiled in a block at its end, not for each graph's own.

    Kernels are compiled by other processes, while Inductor writes the code of the next graph here. The code of a graph
    cannot run before the end of the block. Graphs of other threads wait as usual; a block of another thread begins when
    this one ends.
    """
    modules: list[tuple[Any, dict[str, Any]]] = []
    with _TOGETHER:
        waiting, wait = _waiting()
        thread = threading.get_ident()

        def later(compiling: Any, names: dict[str, Any]) -> None:
            if threading.get_ident() == thread:
                modules.append((compiling, names))
            else:
                wait(compiling, names)

        waiting.wait = later
        try:
            yield
        finally:
            waiting.wait = wait
    kernels: dict[int, tuple[Any, Any]] = {}  # by the future that several modules may share, which is held meanwhile
    for compiling, names in modules:
        futures = {name: value for name, value in names.items() if hasattr(value, "result")}
        names.update({name: kernels[id(value)][1] for name, value in futures.items() if id(value) in kernels})
        wait(compiling, names)
        kernels.update((id(value), (value, names[name])) for name, value in futures.items())


@_INDUCTOR
def _waiting() -> tuple[Any, Callable[[Any, dict[str, Any]], None]]:
    """Inductor's class that compiles kernels in other processes, and its function that waits for those of a module."""
    compiler: Any = importlib.import_module("torch._inductor.async_compile").AsyncCompile
    return compiler, compiler.wait


@_INDUCTOR
def decompose(module: fx.GraphModule, inputs: Sequence[Any], table: Mapping[Any, Any]) -> fx.GraphModule:
    """Trace a graph again on fake tensors, with Inductor's decompositions and those of ``table``.

    Some decompositions give results of other strides than their op, such as that of ``cat`` with an empty tensor, or of
    another dtype, as the statistics of a group norm on a CPU. Results get the graph's strides and dtypes.
    """
    make_fx = importlib.import_module("torch.fx.experimental.proxy_tensor").make_fx
    importlib.import_module("torch._inductor.compile_fx")  # which loads all that decompositions refer to
    decompositions = importlib.import_module("torch._inductor.decomposition").select_decomp_table()
    with _fake_mode(inputs), torch.no_grad():
        traced: fx.GraphModule = make_fx(module, decomposition_table={**decompositions, **table})(*inputs)
        (outcome,), (expected,) = (each.graph.find_nodes(op="output") for each in (traced, module))
        with traced.graph.inserting_before(outcome):
            outcome.args = (tuple(map(_laid_out, outcome.args[0], expected.args[0])),)
        traced.recompile()
    return traced


def _laid_out(node: Any, like: Any) -> Any:
    """A result in the dtype and the dense layout of another; in its own layout where the other is not dense."""
    value, expected = (each.meta.get("val") if isinstance(each, fx.Node) else None for each in (node, like))
    if not isinstance(value, Tensor) or not isinstance(expected, Tensor):
        return node
    if value.dtype != expected.dtype:
        convert = torch.ops.prims.convert_element_type.default
        node, value = node.graph.call_function(convert, (node, expected.dtype)), convert(value, expected.dtype)
        node.meta["val"] = value
    if value.stride() == expected.stride():
        return node
    order = sorted(range(value.dim()), key=expected.stride().__getitem__, reverse=True)
    if not expected.permute(order).is_contiguous():
        return node
    back = sorted(range(value.dim()), key=order.__getitem__)
    aten = torch.ops.aten
    for op, *arguments in ((aten.permute.default, order), (aten.clone.default,), (aten.permute.default, back)):
        options = {"memory_format": torch.contiguous_format} if op is aten.clone.default else {}
        value = op(value, *arguments, **options)
        node = node.graph.call_function(op, (node, *arguments), options)
        node.meta["val"] = value
    return node


@contextmanager
def _compiling(inputs: Sequence[Any]) -> Generator[None]:
    """Give Inductor the fake mode of the inputs, which ``torch.compile`` would do."""
    guards = importlib.import_module("torch._guards")
    virtualized = importlib.import_module("torch._inductor.virtualized").V
    mode = _fake_mode(inputs)
    with guards.tracing(guards.TracingContext(mode)), virtualized.set_fake_mode(mode):
        yield


def _fake_mode(inputs: Sequence[Any]) -> Any:
    return next(value.fake_mode for value in inputs if hasattr(value, "fake_mode"))
