"""Forward and backward of a step as one graph of ATen ops, before anything is decided: AOTAutograd's joint graph.

The ops are those of the plain step, in its order, so a step that runs them gives its bits. An op with several results
is followed at once by the ops that take them. Batch norms are the plain step's (``tracing/capture/batchnorm.py``).
"""

from __future__ import annotations

import hashlib
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn

from lowtide.compat.dynamo import ARRAY, inputs_written, is_tangent, module_path, place_of_result, source_of
from lowtide.compat.operators import HigherOrderOperator
from lowtide.compat.tensors import is_zero_tensor
from lowtide.errors import TraceError
from lowtide.tracing.capture.batchnorm import (
    ancestors,
    copy_inputs_written_to,
    descendants,
    is_batch_norm,
    restore_batch_norms,
    take_counters,
)

Origin = Literal["parameter", "batch", "array", "kept"]  # an array is numpy's; kept are buffers and all else

_UNSAFE_VIEW = torch.ops.aten._unsafe_view.default  # a view that autograd is not to know as one


class Joint:
    """A joint graph: which ops are forward, which backward, and which results share a storage.

    ``origins`` name its inputs, where they are known.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        forward_outputs: int,
        origins: Sequence[Origin] = (),
        *,
        plain_kernels: bool = True,
    ) -> None:
        self._captured = module
        module = _numbered(module)
        self.module = module
        self.forms: dict[str, Joint] = {}  # by lowering: this graph as it runs it
        self.compiled: dict[str, Callable[..., Any]] = {}  # by digest: code of a part of it
        self.rewrites: dict[str, int] = {}  # by name: places that it changed
        restore_batch_norms(module, plain_kernels=plain_kernels)
        self.counters = take_counters(module)  # buffers that count on, and by how much; no op does
        self.copies = copy_inputs_written_to(module)  # of inputs, which have changed by backward
        nodes = list(module.graph.nodes)
        inputs = [node for node in nodes if node.op == "placeholder"]
        self.tangents = list(filter(is_tangent, inputs))
        for node in self.tangents:  # AOTAutograd has them like the outputs, in storages as large
            node.meta["val"] = torch.empty_like(node.meta["val"])
        self.primals = [node for node in inputs if not is_tangent(node)]
        self.origins = dict(zip(self.primals, origins, strict=False)) if len(origins) == len(self.primals) else {}
        results = _as_list(nodes[-1].args[0])
        self.outputs, self.gradients = results[:forward_outputs], results[forward_outputs:]
        self._refuse_unknown()
        loss = place_of_result(module.graph, forward_outputs)  # behind new values of inputs, before attributes it set
        self.loss: fx.Node = self.outputs[loss]
        moved, set_ = self.outputs[:loss], self.outputs[loss + 1 :]  # new values of inputs, and of attributes
        self.stored = [v for v in set_ if isinstance(v, fx.Node) and v not in moved]  # on the model itself
        # By output: the place of the input whose new value it is, or -1.
        written = inputs_written(module.graph)[:forward_outputs]
        self.written = [-1 if node is None else self.primals.index(node) for node in written]
        self.written += [-1] * (forward_outputs - len(self.written))
        self.forward, self.backward = self._passes()
        self.storages: dict[fx.Node, fx.Node] = {}  # the op that made the storage of a result
        for node in nodes:
            shown = viewed(node)
            self.storages[node] = node if shown is None else self.storages[shown]

    def _refuse_unknown(self) -> None:
        """Raise ``TraceError`` where a program would not know bytes or an order."""
        values = [node.meta.get("val") for node in self.module.graph.nodes]
        if any(map(_is_sparse, values)):
            raise TraceError("The step has sparse tensors, whose bytes are not known before it runs")
        if any(map(_is_unknown, values)):
            raise TraceError(
                "The step has tensors whose sizes depend on values: its bytes are not known before it runs"
            )
        has_effects = any(isinstance(node.target, HigherOrderOperator) for node in self.module.graph.nodes)
        if has_effects or len(self.gradients) != len(self.primals):
            raise TraceError("The step has ops with effects of their own, which a program cannot order")

    def _passes(self) -> tuple[list[fx.Node], list[fx.Node]]:
        """Ops of forward and of backward. Forward has those with effects, such as draws, wanted or not."""
        ops = _with_items(node for node in self.module.graph.nodes if node.op in ("call_function", "get_attr"))
        waiting = descendants(self.tangents)
        effects = [node for node in ops if node not in waiting and (is_random(node) or is_batch_norm(node))]
        needed = ancestors([*self.outputs, *self.copies, *effects])
        needed |= {node for node in ops if is_item(node) and node.args[0] in needed}
        return [node for node in ops if node in needed], [node for node in ops if node not in needed]

    def as_captured(self) -> fx.GraphModule:
        """A copy of the graph as it was captured, to be rewritten."""
        return _numbered(self._captured)

    def rewritten(self, module: fx.GraphModule) -> Joint:
        """The joint graph of a rewritten copy, with the same inputs and outputs. Batch norms stay as captured."""
        return Joint(module, len(self.outputs), list(self.origins.values()), plain_kernels=False)

    @cached_property
    def prepared(self) -> frozenset[fx.Node]:
        """Backward's ops that wait for no gradient, such as a mask: they read forward's results alone."""
        waiting = descendants(self.tangents)
        return frozenset(node for node in self.backward if node not in waiting)

    @property
    def constants(self) -> dict[str, Tensor]:
        """Tensors that the graph holds, by name: made anew in each plain step, and here once and for all."""
        named = {str(node.target) for node in self.module.graph.nodes if node.op == "get_attr"}
        values = {name: operator.attrgetter(name)(self.module) for name in sorted(named)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    @cached_property
    def nodes(self) -> dict[str, fx.Node]:
        return {node.name: node for node in self.module.graph.nodes}

    @cached_property
    def digest(self) -> str:
        """A short name of the graph: the same ops with the same arguments on the same shapes give the same."""
        lines = [f"{node.format_node()} {_described(node.meta.get('val'))}" for node in self.module.graph.nodes]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]

    def is_forward(self, node: fx.Node) -> bool:
        return node in self._forward

    @cached_property
    def _forward(self) -> frozenset[fx.Node]:
        return frozenset(self.forward)


def _numbered(module: fx.GraphModule) -> fx.GraphModule:
    """A copy whose ops are numbered in their order, by name. So the same ops have the same names in each capture."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda value: copies[value])
        name = node.name if node.op in ("placeholder", "output") else re.sub(r"(_\d+)+$", "", node.name)
        copies[node] = graph.create_node(node.op, node.target, args, kwargs, name, node.type)
        copies[node].meta = dict(node.meta)
    return fx.GraphModule(module, graph)


def bytes_of(node: fx.Node) -> int:
    """The bytes of the storage behind a result; of an op with several results none, as each has its own node."""
    return size_of(node.meta.get("val"))


def size_of(value: Any) -> int:
    """The bytes of a tensor's storage; of anything else, and of zeros that nothing holds, none."""
    return value.untyped_storage().nbytes() if isinstance(value, Tensor) and not is_zero_tensor(value) else 0


def module_of(node: fx.Node) -> str:
    """The path of the module that ran an op, or whose backward pass an op belongs to; "" for the loss function."""
    return module_path(node).partition(".model.")[2]


def is_item(node: fx.Node) -> bool:
    """Tell whether it is one of an op's several results."""
    return node.target is operator.getitem


def is_random(node: fx.Node) -> bool:
    """Tell whether the op draws random numbers, or may: other libraries' ops need not say so."""
    tags, library = getattr(node.target, "tags", ()), getattr(node.target, "namespace", "aten")
    return torch.Tag.nondeterministic_seeded in tags or library not in ("aten", "prims", "lowtide")


def _with_items(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """The ops in order, each followed by its several results."""
    ordered: list[fx.Node] = []
    for node in nodes:
        if not is_item(node):
            ordered += [node, *(user for user in node.users if is_item(user))]
    return ordered


def origin_of(placeholder: fx.Node, value: Any) -> Origin:
    """Classify an input of Dynamo's graph."""
    if isinstance(value, nn.Parameter):
        return "parameter"
    origins: dict[str, Origin] = {ARRAY: "array", "batch": "batch"}
    return origins.get(source_of(placeholder), "kept")


def _is_sparse(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is not torch.strided


def _is_unknown(value: Any) -> bool:
    return isinstance(value, Tensor) and not all(isinstance(size, int) for size in value.shape)


def viewed(node: fx.Node) -> fx.Node | None:
    """The argument whose storage a result shows; None for a storage of its own."""
    if is_item(node) and getattr(node.args[0].target, "is_view", False):  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
        return node.args[0]  # pyright: ignore[reportReturnType]
    if node.op != "call_function" or not (getattr(node.target, "is_view", False) or node.target is _UNSAFE_VIEW):
        return None
    return next((value for value in node.args if isinstance(value, fx.Node)), None)


def _described(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return ", ".join(map(_described, value))
    return f"{value.dtype}{list(value.shape)}{list(value.stride())}" if isinstance(value, Tensor) else ""


def _as_list(outputs: Any) -> list[Any]:
    return list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]
