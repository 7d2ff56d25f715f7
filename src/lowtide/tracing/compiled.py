"""Modules under ``torch.compile``: measure Inductor's allocations, and show each graph as one op."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from torch import nn

from lowtide.compat.dynamo import compiled_module, inductor_graph
from lowtide.compat.modules import COMPILED_CALL, runs_compiled
from lowtide.tracing.recorder import Recorder
from lowtide.workload import Workload


def compiled_modules(work: Workload) -> set[int]:
    """Ids of the modules whose forward runs inside a compiled one: hooks there would make Dynamo recompile."""
    inside: set[int] = set()
    if is_compiled(work.loss):
        inside.update(map(id, work.model.modules()))
    for module in work.model.modules():
        if runs_compiled(module):
            original = compiled_module(module)
            inside.update(map(id, (module if original is None else original).modules()))
    return inside


def is_compiled(loss: Any) -> bool:
    """Tell whether a loss function is captured as a whole, like a planned step's, or is one in pieces."""
    inner = inspect.unwrap(loss, stop=lambda each: getattr(each, "is_compiled", False))
    return getattr(inner, "is_compiled", False)


@contextmanager
def opaque_compiled_graphs(recorder: Recorder, model: nn.Module, *, expected: bool) -> Generator[None]:
    """Record every call of an Inductor graph, forward or backward, as one op.

    Inductor allocates behind the dispatcher, so its buffers cannot be followed one by one.
    """
    compiled_graph = inductor_graph(imports=expected)
    if compiled_graph is None:
        yield
        return
    original = compiled_graph.__call__

    def call(self: Any, inputs: Any) -> Any:
        return recorder.run_opaque("inductor.graph", inputs, lambda: original(self, inputs))

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(compiled_graph, "__call__", call))
        for module in model.modules():
            # Both live in the module's own __dict__, next to what torch.compile put there.
            for name in (COMPILED_CALL, "forward"):
                compiled = module.__dict__.get(name)
                if compiled is not None and (name != "forward" or compiled_module(module) is not None):
                    stack.enter_context(mock.patch.dict(module.__dict__, {name: _unhooked(recorder, compiled)}))
        yield


def _unhooked(recorder: Recorder, function: Callable[..., Any]) -> Callable[..., Any]:
    """Call without the recorder's saved-tensor hooks: Dynamo would compile them, and the region again."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with recorder.without_hooks():
            return function(*args, **kwargs)

    return call
