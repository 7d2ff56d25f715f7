"""Forward and backward of a step as one graph of ATen ops, before anything is decided: AOTAutograd's joint graph.

The ops are those of the plain step, in its order, so a step that runs them gives its bits. Two things are changed, and
neither changes a value: results of ops with several are taken right after the op; and in training the backward of a
batch norm no longer reads the running statistics, which it does not use, and which have moved by then.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

_aten: Any = torch.ops.aten


class Joint:
    """A joint graph: which ops are forward, which backward, and which results share a storage."""

    def __init__(self, module: fx.GraphModule, forward_outputs: int) -> None:
        self.module = module
        _forget_running_statistics(module)
        nodes = list(module.graph.nodes)
        outputs = _as_list(nodes[-1].args[0])
        self.outputs, self.gradients = outputs[:forward_outputs], outputs[forward_outputs:]
        inputs = [node for node in nodes if node.op == "placeholder"]
        self.tangents = [node for node in inputs if node.name.startswith("tangents")]
        self.primals = [node for node in inputs if not node.name.startswith("tangents")]
        ops = _with_items(node for node in nodes if node.op in ("call_function", "get_attr"))
        needed = _ancestors(self.outputs)
        needed |= {node for node in ops if is_item(node) and node.args[0] in needed}
        self.forward = [node for node in ops if node in needed]
        self.backward = [node for node in ops if node not in needed]
        self.storages: dict[fx.Node, fx.Node] = {}  # the op that made the storage of a result
        for node in nodes:
            viewed = _viewed(node)
            self.storages[node] = node if viewed is None else self.storages[viewed]

    @cached_property
    def prepared(self) -> frozenset[fx.Node]:
        """Backward's ops that wait for no gradient, such as a mask: they read forward's results alone."""
        waiting: set[fx.Node] = set(self.tangents)
        for node in self.backward:
            if any(value in waiting for value in node.all_input_nodes):
                waiting.add(node)
        return frozenset(node for node in self.backward if node not in waiting)

    def is_forward(self, node: fx.Node) -> bool:
        return node in self._forward

    @cached_property
    def _forward(self) -> frozenset[fx.Node]:
        return frozenset(self.forward)


def bytes_of(node: fx.Node) -> int:
    """The bytes of the storage behind a result; of an op with several results none, as each has its own node."""
    return size_of(node.meta.get("val"))


def size_of(value: Any) -> int:
    """The bytes of a tensor's storage; of anything else none."""
    return value.untyped_storage().nbytes() if isinstance(value, Tensor) else 0


def is_item(node: fx.Node) -> bool:
    """Whether it is one of an op's several results."""
    return node.target is operator.getitem


def is_random(node: fx.Node) -> bool:
    """Whether the op draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def is_batch_norm(node: fx.Node) -> bool:
    """Whether the op also gives new running statistics."""
    return node.target is _aten._native_batch_norm_legit_functional.default


def _forget_running_statistics(module: fx.GraphModule) -> None:
    for node in module.graph.nodes:
        if node.target is _aten.native_batch_norm_backward.default and node.args[7]:
            node.args = (*node.args[:3], None, None, *node.args[5:])


def _with_items(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """The ops in order, each followed by its several results."""
    ordered: list[fx.Node] = []
    for node in nodes:
        if not is_item(node):
            ordered += [node, *(user for user in node.users if is_item(user))]
    return ordered


def _ancestors(nodes: Sequence[Any]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    waiting = [node for node in nodes if isinstance(node, fx.Node)]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return found


def _viewed(node: fx.Node) -> fx.Node | None:
    """The argument whose storage a result shows, by the op's schema; None for a storage of its own."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None or not schema.returns or schema.returns[0].alias_info is None:
        return None
    shown = schema.returns[0].alias_info.before_set
    for argument, value in zip(schema.arguments, node.args, strict=False):
        alias = argument.alias_info
        if isinstance(value, fx.Node) and alias is not None and alias.before_set & shown:
            return value
    return None


def _as_list(outputs: Any) -> list[Any]:
    return list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]
