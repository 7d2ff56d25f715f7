"""Convolutions in half precision on channels-last tensors, the layout of a GPU's tensor cores.

Inputs, weights and gradients are converted once, before the first convolution that reads them. Later ops propagate the
layout, and the graph's outputs keep their strides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from lowtide.compat.operators import name_of
from lowtide.techniques.rewrites.nodes import behind, called
from lowtide.tracing.capture.joint import is_random, viewed
from lowtide.tracing.fake.kernel_dispatch import replaced_kernels
from lowtide.tracing.fake.kernels import FIXES, SUBSTITUTES

_aten: Any = torch.ops.aten
_TYPES = (torch.bfloat16, torch.float16)
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}  # by dimensions
_CONVOLUTION, _BACKWARD = _aten.convolution.default, _aten.convolution_backward.default
_CLONE, _COPIES = _aten.clone.default, (_aten.clone.default, _aten._to_copy.default)
_MOST_GROUPED = 1 / 3  # of a graph's multiplications: Inductor measured grouped convolutions to be slower channels-last
# Kernels below torch's public ops may need strides that the public op has seen to. Those of _ANY_STRIDES do not.
_INTERNAL = ("_", "cudnn", "mkldnn", "miopen", "as_strided")
_ANY_STRIDES = ("_to_copy", "_native_batch_norm", "_adaptive_avg_pool", "_softmax", "_log_softmax", "_unsafe_",
                "_upsample", "_prelu")  # fmt: skip


def lay_channels_last(graph: fx.Graph) -> int:
    """Convert what convolutions read, unless too many are grouped; return how many tensors were converted."""
    convolutions = [
        node for node in graph.find_nodes(op="call_function", target=_CONVOLUTION) if _converted_inputs(node)
    ]
    work = {node: _multiplications(node) for node in convolutions}
    grouped = sum(work[node] for node in convolutions if _is_grouped(node))
    return _Walk(graph).run() if convolutions and grouped <= _MOST_GROUPED * sum(work.values()) else 0


def _converted_inputs(node: fx.Node) -> tuple[Any, ...]:
    """Arguments of a convolution, or of its backward, that are wanted channels-last."""
    args: Any = node.args
    if node.target not in (_CONVOLUTION, _BACKWARD):
        return ()
    value = args[0].meta["val"]
    count = 2 if node.target is _CONVOLUTION else 3
    return args[:count] if value.dim() in _FORMATS and value.dtype in _TYPES else ()


def _multiplications(node: fx.Node) -> int:
    args: Any = node.args
    places = args[0].meta["val"] if args[6] else node.meta["val"]  # a transposed one reads each weight at each input
    return args[1].meta["val"].numel() * places.shape[0] * places.shape[2:].numel()


def _is_grouped(node: fx.Node) -> bool:
    """Tell whether a convolution has groups of several channels. Depthwise ones are fast."""
    args: Any = node.args
    return args[8] > 1 and args[1].meta["val"].shape[1] > 1


class _Walk:
    """One walk over a graph, in order: ops whose inputs changed their layout get new fake results."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.captured: dict[fx.Node, Any] = {node: node.meta.get("val") for node in graph.nodes}
        self.converted: dict[fx.Node, fx.Node] = {}
        self.restored: dict[fx.Node, fx.Node] = {}

    def run(self) -> int:
        count = 0
        *nodes, outcome = self.graph.nodes
        mode = next(value for value in self.captured.values() if hasattr(value, "fake_mode")).fake_mode
        with replaced_kernels(SUBSTITUTES, FIXES), mode:
            for node in nodes:
                count += self._visit(node) if node.op == "call_function" else 0
                if outcome in node.users:
                    outcome.replace_input_with(node, self._restored(node, node.next))
        return count

    def _visit(self, node: fx.Node) -> int:
        """Lay out an op's inputs, and compute its fake result again; return how many tensors were converted."""
        given, count = (node.args, node.kwargs), 0
        if _needs_strides(node):
            self._replace(node, lambda value: self._restored(value, node))
            return 0
        self._replace(node, lambda value: self.converted.get(behind(value), value))
        for value in dict.fromkeys(_converted_inputs(node)):
            count += self._convert(value, node)
        if any(map(self._is_changed, node.all_input_nodes)):
            try:
                node.meta["val"] = _result(node)
            except (RuntimeError, ValueError):  # a view that other strides do not have
                node.args, node.kwargs = given
                self._replace(node, lambda value: self._restored(value, node))
                node.meta["val"] = _result(node)
            count += self._convert_mixed(node)
        return count + (node.target in _COPIES and self._copies_otherwise(node))

    def _replace(self, node: fx.Node, replacement: Callable[[fx.Node], fx.Node]) -> None:
        for value in node.all_input_nodes:
            node.replace_input_with(value, replacement(value))

    def _is_changed(self, node: fx.Node) -> bool:
        return _strides(node.meta.get("val")) != _strides(self.captured.get(node))

    def _convert(self, value: fx.Node, node: fx.Node) -> bool:
        """Convert a tensor before the op that reads it, unless it is channels-last."""
        if _is_laid(value.meta["val"]):
            return False
        with self.graph.inserting_before(node):
            copy = called(self.graph, _CLONE, value, like=node, memory_format=_FORMATS[value.meta["val"].dim()])
        self.converted[behind(value)] = copy
        node.replace_input_with(value, copy)
        return True

    def _convert_mixed(self, node: fx.Node) -> int:
        """Convert an op's other inputs where one is channels-last and the result would not be."""
        value = node.meta["val"]
        mixes = torch.Tag.pointwise in getattr(node.target, "tags", ()) or node.target is _aten.cat.default
        if not mixes or value.dim() not in _FORMATS or _is_laid(value):
            return 0
        inputs = [each for each in node.all_input_nodes if each.meta["val"].dim() == value.dim()]
        if all(each.meta["val"].is_contiguous() or not _is_laid(each.meta["val"]) for each in inputs):
            return 0
        count = sum(self._convert(each, node) for each in inputs if 0 not in each.meta["val"].stride())
        node.meta["val"] = _result(node)
        return count

    def _copies_otherwise(self, node: fx.Node) -> bool:
        """Have a copy write the layout that its reader wants; tell whether that converts it for a convolution."""
        value, captured = node.meta["val"], self.captured[node]
        is_read = any(node in _converted_inputs(user) for user in node.users)
        is_returned = any(user.op == "output" for user in node.users) and captured.is_contiguous()
        if _is_laid(value) if is_read else not (is_returned and self._is_changed(node)):
            return False
        node.kwargs = {**node.kwargs, "memory_format": _FORMATS[value.dim()] if is_read else torch.contiguous_format}
        node.meta["val"] = _result(node)
        return is_read

    def _restored(self, node: fx.Node, before: fx.Node) -> fx.Node:
        """The value with the strides that were captured: of a view, the same view of such a value."""
        if not self._is_changed(node):
            return node
        if node not in self.restored:
            base = viewed(node)
            if base is None:
                self.restored[node] = self._dense(node, self.captured[node], before)
            else:
                base = self._restored(base, before)
                with self.graph.inserting_before(before):
                    args = (base, *node.args[1:])
                    self.restored[node] = called(self.graph, node.target, *args, like=node, **node.kwargs)
        return self.restored[node]

    def _dense(self, node: fx.Node, like: Tensor, before: fx.Node) -> fx.Node:
        """The value with the dense strides of ``like``."""
        order = sorted(range(like.dim()), key=like.stride().__getitem__, reverse=True)
        back = sorted(range(like.dim()), key=order.__getitem__)
        copy: tuple[Any, list[Any], dict[str, Any]] = (_CLONE, [], {"memory_format": torch.contiguous_format})
        calls = [(_aten.permute.default, [order], {}), copy, (_aten.permute.default, [back], {})]
        if like.is_contiguous():
            calls = [copy]
        if like.is_contiguous() and node.meta["val"].is_contiguous():  # strides of single elements alone differ
            calls = [(_aten.view.default, [shape], {}) for shape in ([like.numel()], list(like.shape))]
        with self.graph.inserting_before(before):
            for target, args, kwargs in calls:
                node = called(self.graph, target, node, *args, like=node, **kwargs)
        return node


def _result(node: fx.Node) -> Any:
    target: Any = node.target
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda value: value.meta["val"])
    return target(*args, **kwargs)


def _is_laid(value: Tensor) -> bool:
    return value.is_contiguous(memory_format=_FORMATS[value.dim()])


def _strides(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [*map(_strides, value)]
    return value.stride() if isinstance(value, Tensor) else None


def _needs_strides(node: fx.Node) -> bool:
    """Tell whether an op may depend on the strides that it was captured with, as the order of random draws does."""
    name = name_of(node.target).removeprefix("aten::")
    return is_random(node) or (name.startswith(_INTERNAL) and not name.startswith(_ANY_STRIDES))
