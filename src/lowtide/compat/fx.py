"""Python code that torch.fx writes for a graph."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx import graph as fx_graph

from lowtide.compat.versions import CAPTURE

_aten: Any = torch.ops.aten


@CAPTURE
def line_of(node: fx.Node) -> tuple[str, int]:
    """Return file and line of the innermost Python code that a captured op comes from; ("", 0) where none is known."""
    place = fx_graph._parse_stack_trace(node.meta.get("stack_trace") or "")
    return ("", 0) if place is None else (place.file, int(place.lineno))


@CAPTURE
def box_arguments(graph: fx.Graph) -> None:
    """Have a graph's code take its arguments in one list, and empty it."""
    graph.set_codegen(fx_graph._BoxedCodeGen())


@CAPTURE
def bound_forward(graph: fx.Graph) -> Callable[..., Any]:
    """Compile a graph's code, ATen's ops bound to their functions in C++: looking one up costs as much as a small op.

    Its first argument is the module. Ops in code of another form are called as torch writes them.
    """
    code = graph.python_code("self")
    bound: dict[str, Any] = {}

    def bind(call: re.Match[str]) -> str:
        name = f"_op_{call[1]}_{call[2]}"
        bound[name] = getattr(getattr(_aten, call[1]), call[2])._op
        return name

    source = re.sub(r"torch\.ops\.aten\.(\w+)\.(\w+)(?=\()", bind, code.src)
    scope = {**code.globals, **bound}
    exec(compile(source, "<a planned step>", "exec"), scope)
    return scope["forward"]
