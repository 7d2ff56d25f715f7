"""Autograd's graph, its nodes and its engine, and the hooks on saved tensors and gradients."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from inspect import isgenerator
from operator import attrgetter, methodcaller
from traceback import walk_tb
from typing import Any

import torch
from torch import Tensor

from lowtide.compat.dispatch import without_modes
from lowtide.compat.versions import TRIED

top_saved_hooks: Callable[[bool], tuple[Any, Any] | None] = TRIED.find(
    "torch._C:_autograd._top_saved_tensors_default_hooks"
)
"""Return the innermost pair of saved-tensor hooks, or None. Pass True, which also asks where hooks are disabled."""

push_saved_hooks: Callable[[Any, Any], None] = TRIED.find("torch._C:_autograd._push_saved_tensors_default_hooks")
"""Put a pair of saved-tensor hooks on top, without a ``with`` block."""

pop_saved_hooks: Callable[[], None] = TRIED.find("torch._C:_autograd._pop_saved_tensors_default_hooks")
"""Remove the innermost pair of saved-tensor hooks."""

why_saved_hooks_are_disabled: Callable[[], str | None] = TRIED.find(
    "torch._C:_autograd._saved_tensors_hooks_get_disabled_error_message"
)
"""Return the message for those who push saved-tensor hooks where they are disabled, or None."""

graph_task_id: Callable[[], int] = TRIED.find("torch._C:_current_graph_task_id")
"""Return the number of the backward pass that runs in this thread, or -1."""

keeps_graph: Callable[[], bool] = TRIED.find("torch._C:_autograd._get_current_graph_task_keep_graph")
"""Tell whether the backward pass that runs was asked to retain its graph."""

current_node: Callable[[], Any] = TRIED.find("torch._C:_current_autograd_node")
"""Return the node whose backward formula runs in this thread, or None."""

next_sequence_number: Callable[[], int] = TRIED.find("torch._C:_autograd._get_sequence_nr")
"""Return the number that the next node of this thread's graph gets."""

sequence_number: Callable[[Any], int] = methodcaller("_sequence_nr")
"""Return a node's number, by which the engine orders nodes."""

input_metadata: Callable[[Any], Any] = attrgetter("_input_metadata")
"""Return shape, dtype and device of each gradient that a node takes."""

set_version_counters: Callable[[tuple[Tensor, ...], tuple[int, ...]], None] = TRIED.find(
    "torch._C:_autograd._unsafe_set_version_counter"
)
"""Set the version counters of tensors whose values were restored."""

call_after_backward: Callable[[Callable[[], None]], None] = TRIED.find(
    "torch.autograd:Variable._execution_engine.queue_callback"
)
"""Have the engine call a function at the end of the backward pass that runs."""


def _nodes(*names: str) -> tuple[Any, ...]:
    return tuple(TRIED.find(f"torch._C:_functions.{name}") for name in names)


NLL_NODES = _nodes("NllLossBackward0", "NllLoss2DBackward0", "NllLossBackwardBackward0", "NllLoss2DBackwardBackward0")
"""Classes of the nodes of torch's cross entropies, and of those of their gradients."""

LOG_SOFTMAX_NODES = _nodes("LogSoftmaxBackward0", "LogSoftmaxBackwardDataBackward0")
"""Classes of the nodes of a log-softmax, and of its gradient."""

DIVISION_NODES = _nodes("DivBackward0")
"""Classes of the nodes of a division by a tensor."""

CHECKPOINT = "torch.utils.checkpoint"
"""The ``__module__`` of hooks by which checkpoints save tensors, and the ``__name__`` of frames in which they do."""


def close_checkpoints(error: BaseException) -> None:
    """Take off the saved-tensor hooks of checkpoints through which an error went: torch 2.11 leaves them on."""
    if torch.compiler.is_compiling():
        return
    for frame, _ in reversed(list(walk_tb(error.__traceback__))):
        if frame.f_globals.get("__name__") == CHECKPOINT and isgenerator(generator := frame.f_locals.get("gen")):
            generator.close()


class _Thread(threading.local):
    runs_backward = False  # by ``backward_in_python``


_thread = _Thread()


def in_backward() -> bool:
    """Tell whether a backward pass runs in this thread: a module's forward is then a checkpoint's recomputation."""
    if torch.compiler.is_compiling():
        return False
    return _thread.runs_backward or graph_task_id() != -1


@contextmanager
def backward_in_python() -> Generator[None]:
    """Have ``in_backward`` know of a backward pass that is not the engine's."""
    _thread.runs_backward = True
    try:
        yield
    finally:
        _thread.runs_backward = False


def apply_of(function: type[torch.autograd.Function]) -> Any:
    """Return ``function.apply`` without its step for ``torch.func``, which costs as much as a small op."""
    return getattr(super(torch.autograd.Function, function), "apply", function.apply)


def saved_value(node: Any, name: str, *default: Any) -> Any:
    """Return a value that a node saved for its formula, unpacked; the default where it saves none of that name."""
    return getattr(node, f"_saved_{name}", *default)


def raw_saved(node: Any, name: str) -> Any:
    """Return a saved tensor's slot in a node, which takes hooks of its own."""
    return getattr(node, f"_raw_saved_{name}")


def packed_tensors(node: Any) -> Iterator[Any]:
    """Yield what saved-tensor hooks returned for a node's saves; nothing once its backward freed them."""
    with suppress(RuntimeError):
        yield from (slot.data for slot in _slots(node))


def _slots(node: Any) -> Iterator[Any]:
    for name in dir(node):
        if name.startswith("_raw_saved_"):
            slot = getattr(node, name)
            yield from slot if isinstance(slot, tuple) else (slot,)


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return 2 * x


@cache
def custom_nodes_die() -> bool:
    """Tell whether a custom function's node dies with the last node that leads to it, though Python holds it."""
    with without_modes(), torch.enable_grad():
        node = _Double.apply(torch.ones(1, device="cpu", requires_grad=True)).grad_fn
    try:
        return not node.next_functions
    except RuntimeError:
        return True


class Packed:
    """A tensor that saved-tensor hooks packed, which ``release_saved`` frees."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor


def release_saved(node: Any) -> None:
    """Free the tensors that a node saved, as torch's engine does after it ran. Other hooks' packed ones stay."""
    with without_modes():
        for slot in _slots(node):
            with suppress(RuntimeError):  # no tensor was saved, or hooks packed it
                slot.register_hooks(lambda _: None, lambda _: None)
            packed = getattr(slot, "data", None)
            for part in packed if isinstance(packed, tuple) else (packed,):  # a tuple by hooks inside of others
                if isinstance(part, Packed):
                    part.tensor = None


def tensor_hooks(tensor: Tensor) -> dict[int, Any]:
    """Return the hooks on a tensor's gradient: the tensor's own dictionary, or an empty one."""
    return getattr(tensor, "_backward_hooks", None) or {}


def gradient_hooks(parameter: Tensor) -> dict[int, Any]:
    """Return the hooks that run after a parameter's gradient was accumulated, in their order."""
    return getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
