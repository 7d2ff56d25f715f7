"""A backward pass in Python, for fake CUDA tensors where torch has no CUDA.

torch's own engine asks for the current stream of every gradient's device and gives up when there is no such
device. This one visits the same nodes in the same order and accumulates by the same rules, without streams.
Tensor hooks do not run: they rarely change the memory, and a prediction has no values for them. Hooks after a
gradient's accumulation do run, since they may free it.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from lowtide.compat.autograd import (
    backward_in_python,
    custom_nodes_die,
    gradient_hooks,
    input_metadata,
    release_saved,
    sequence_number,
)
from lowtide.compat.dispatch import without_modes
from lowtide.compat.tensors import tensor_holders
from lowtide.tracing.plain_aten.gradient_accumulation import fits, held_by_call, held_twice

_LEAF = -1  # leaves come first: torch gives them the highest sequence number


def backward(loss: Tensor, visit: Callable[[Any], None]) -> None:
    """Accumulate gradients into the leaves. Calls ``visit(node)`` before a node runs, ``visit(None)`` after.

    Takes the graph apart as it goes: the caller must not hold the loss, or saved tensors stay alive.
    """
    root = loss.grad_fn
    assert root is not None
    start: list[Tensor | None] = [None] * len(input_metadata(root))
    start[loss.output_nr] = torch.ones_like(loss, memory_format=torch.preserve_format)
    owners = {root: _token(loss)} if _is_custom(root) else {}  # objects that keep custom nodes alive
    del loss
    pending = _dependencies(root)
    inputs: dict[Any, list[Tensor | None]] = {root: start}
    ready = [(_priority(root), 0, root)]
    order = 1
    del root
    with torch.no_grad(), _one_backward(), backward_in_python():
        while ready:
            node = heapq.heappop(ready)[2]
            visit(node)
            gradients = _call(node, inputs.pop(node))
            edges = node.next_functions
            visit(None)
            owner = _owner(node, edges, owners.pop(node, None))
            del node  # and with it what it saved
            for index, (target, slot) in enumerate(edges):
                if target is None:
                    continue
                gradient = gradients[index]
                gradients[index] = None
                if gradient is not None:
                    gradient = _fitted(gradient, input_metadata(target)[slot])
                    slots = inputs.setdefault(target, [None] * len(input_metadata(target)))
                    held = slots[slot]
                    if held is None:
                        slots[slot] = gradient
                    elif held_twice(held) and fits(held, gradient):
                        held.add_(gradient)
                    else:
                        slots[slot] = held + gradient
                    del slots, held
                del gradient
                pending[target] -= 1
                if pending[target] == 0:
                    del pending[target]
                    if target in inputs:
                        if owner is not None and _is_custom(target):
                            owners[target] = owner
                        heapq.heappush(ready, (_priority(target), order, target))
                        order += 1
                del target
            del edges, owner


def _is_custom(node: Any) -> bool:
    return hasattr(node, "apply")


def _token(loss: Tensor) -> Any:
    """Return an object that keeps the loss's node alive, and no bytes."""
    with without_modes():
        return get_gradient_edge(loss).ownership_token


def _owner(node: Any, edges: Any, owner: Any) -> Any:
    """Return an object that keeps the custom nodes behind this one alive, where Python's references do not.

    It is the node itself, without what it saved, and the owner that keeps the node alive.
    """
    if not (custom_nodes_die() and any(_is_custom(target) for target, _ in edges)):
        return None
    release_saved(node)
    return (node, owner)


def _one_backward() -> AbstractContextManager[object]:
    """Mark one backward pass for checkpoints, so that they recompute once."""
    group = getattr(torch.utils.checkpoint, "GraphExecGroup", None)
    return nullcontext() if group is None else group()


def _dependencies(root: Any) -> dict[Any, int]:
    """Number of edges to each node below the root."""
    counts: dict[Any, int] = {}
    seen = {root}
    stack = [root]
    while stack:
        for target, _ in stack.pop().next_functions:
            if target is None:
                continue
            counts[target] = counts.get(target, 0) + 1
            if target not in seen:
                seen.add(target)
                stack.append(target)
    return counts


def _priority(node: Any) -> int:
    return _LEAF if hasattr(node, "variable") else 2**62 - sequence_number(node)


def _call(node: Any, gradients: list[Tensor | None]) -> list[Tensor | None]:
    if hasattr(node, "variable"):
        gradient = gradients.pop()
        if gradient is not None:
            _accumulate(node.variable, gradient)
            del gradient
            for hook in list(gradient_hooks(node.variable).values()):
                hook(node.variable)
        return []
    if _is_custom(node):
        if getattr(node, "materialize_grads", True):
            gradients = [
                torch.zeros(m.shape, dtype=m.dtype, device=m.device) if g is None else g
                for g, m in zip(gradients, input_metadata(node), strict=True)
            ]
        out = node.apply(*gradients)
    else:
        out = node(*gradients)
    return list(out) if isinstance(out, tuple) else [out]


def _accumulate(variable: Tensor, gradient: Tensor) -> None:
    """Act as AccumulateGrad: take the gradient over if nobody else holds it, add it otherwise."""
    if variable.grad is not None:
        variable.grad += gradient
        return
    dense = variable.is_contiguous() or variable.is_contiguous(memory_format=torch.channels_last)
    fits = gradient.stride() == variable.stride() if dense else gradient.is_contiguous()
    # The name here, the caller's and getrefcount's own: more means that another node holds it.
    if fits and sys.getrefcount(gradient) <= 3 + held_by_call() and tensor_holders(gradient) <= 1:
        variable.grad = gradient.detach()
    elif dense:
        variable.grad = gradient.new_empty_strided(variable.shape, variable.stride()).copy_(gradient)
    else:
        variable.grad = gradient.clone(memory_format=torch.contiguous_format)


def _fitted(gradient: Tensor, metadata: Any) -> Tensor:
    """Fit a gradient as the engine does: undo broadcasting, cast to the forward's dtype."""
    if gradient.shape != metadata.shape:
        gradient = gradient.sum_to_size(metadata.shape)
    if gradient.dtype != metadata.dtype:
        gradient = gradient.to(metadata.dtype)
    return gradient
