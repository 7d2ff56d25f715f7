"""Modules under ``torch.compile``: what Inductor allocates is measured, and shown as one op."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.tracing.recorder import Recorder


def compiled_modules(model: nn.Module) -> set[int]:
    """Ids of the modules whose forward runs inside a compiled one: hooks there would make Dynamo recompile."""
    inside: set[int] = set()
    for module in model.modules():
        if isinstance(module, torch._dynamo.OptimizedModule):
            inside.update(id(child) for child in module._orig_mod.modules())
        elif module._compiled_call_impl is not None:
            inside.update(id(child) for child in module.modules())
    return inside


@contextmanager
def opaque_compiled_graphs(recorder: Recorder, *, expected: bool) -> Iterator[None]:
    """Record every call of an Inductor graph, forward or backward, as one op.

    Inductor allocates behind the dispatcher, so its buffers cannot be followed one by one.
    """
    if not expected and "torch._inductor.output_code" not in sys.modules:
        yield
        return
    compiled_graph: Any = importlib.import_module("torch._inductor.output_code").CompiledFxGraph
    original = compiled_graph.__call__

    def call(self: Any, inputs: Any) -> Any:
        tensors = [item for item in inputs if isinstance(item, Tensor)]
        name = "inductor.backward" if getattr(self, "is_backward", False) else "inductor.graph"
        return recorder.run_opaque(name, tensors, lambda: original(self, inputs))

    compiled_graph.__call__ = call
    try:
        yield
    finally:
        compiled_graph.__call__ = original
