"""A joint graph with symbols for some sizes, and the joint graphs that it stands for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from lowtide.compat.dynamo import is_tangent
from lowtide.compat.fake import FakeTensor, captured_fake_mode
from lowtide.compat.symbols import expression_of, is_symbol, value_of
from lowtide.compat.tensors import is_zero_tensor
from lowtide.errors import TraceError
from lowtide.tracing.capture.joint import Joint, Origin

_aten: Any = torch.ops.aten
_SLICES = (_aten.slice.Tensor, _aten.slice_backward.default)  # of a whole dimension too, where sizes are symbols
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


class SymbolicJoint:
    """A joint graph of AOTAutograd's with symbols for some sizes, which are inputs too.

    It holds for the shapes that pass the guards of its capture; Dynamo checks them at every call.
    """

    def __init__(self, module: fx.GraphModule, forward_outputs: int, origins: Sequence[Origin]) -> None:
        self.module, self.forward_outputs = module, forward_outputs
        inputs = [node for node in module.graph.find_nodes(op="placeholder") if not is_tangent(node)]
        self.inputs = len(inputs)
        self.sizes = tuple(i for i, node in enumerate(inputs) if isinstance(node.meta["val"], _SYMBOLIC))
        self.origins: list[Origin] = [origin for i, origin in enumerate(origins) if i not in self.sizes]

    def at(self, sizes: Sequence[int]) -> Joint:
        """The joint graph that a capture of one shape would give, with these values of the inputs that are sizes."""
        return Joint(_Shape(self, sizes).written(), self.forward_outputs, self.origins)


class _Shape:
    """Writes the graph of one shape."""

    def __init__(self, whole: SymbolicJoint, sizes: Sequence[int]) -> None:
        self.whole = whole
        self.given = dict(zip(whole.sizes, sizes, strict=True))  # by place
        self.symbols: dict[Any, int] = {}
        self.known: dict[Any, int] = {}  # by expression
        self.mode = captured_fake_mode()
        self.graph = fx.Graph()
        self.now: dict[fx.Node, Any] = {}  # a node, or a number

    def written(self) -> fx.GraphModule:
        nodes = list(self.whole.module.graph.nodes)
        inputs = [node for node in nodes if node.op == "placeholder"]
        for place, node in enumerate(inputs):
            if place in self.given:
                self._bind(node, self.given[place])
        open_inputs = [node for node in inputs if node not in self.now]
        primals = 0
        for node in open_inputs:
            primals += not is_tangent(node)
            name = node.name if is_tangent(node) else f"primals_{primals}"
            self.now[node] = self.graph.placeholder(name)
            self.now[node].meta = self._meta(node)
        for node in nodes:
            if node.op == "output":
                self._end(node)
            elif node.op != "placeholder":
                self._write(node)
        return fx.GraphModule(self.whole.module, self.graph)

    def _bind(self, node: fx.Node, value: int) -> None:
        size: Any = node.meta["val"]
        expression = expression_of(size)
        if is_symbol(expression):
            self.symbols[expression] = value
        elif value_of(expression, self.symbols) != value:
            raise TraceError(f"The size {expression} is not {value}")
        self.now[node] = value

    def _write(self, node: fx.Node) -> None:
        value = node.meta.get("val")
        if isinstance(value, _SYMBOLIC):
            self.now[node] = self._number(node, value)
            return
        args, kwargs = self._arguments(node)
        meta = self._meta(node)
        if node.target in _SLICES and args[0].meta["val"].shape == meta["val"].shape:
            self.now[node] = args[0]
            return
        self.now[node] = self.graph.create_node(node.op, node.target, args, kwargs, node.name)
        self.now[node].meta = meta

    def _number(self, node: fx.Node, value: Any) -> Any:
        """A size, or a number made of sizes as Python makes it."""
        if isinstance(value, torch.SymInt):
            return self._size(value)
        if any(isinstance(self.now[each], fx.Node) for each in node.all_input_nodes) or not callable(node.target):
            raise TraceError(f"The number {node.name} depends on more than the batch's shape")
        args, kwargs = self._arguments(node)
        return node.target(*args, **kwargs)

    def _arguments(self, node: fx.Node) -> Any:
        return fx.map_arg((node.args, node.kwargs), lambda each: self.now[each])

    def _end(self, node: fx.Node) -> None:
        """The outputs, without gradients of inputs that are sizes."""
        (values,), _ = self._arguments(node)
        first = self.whole.forward_outputs
        outputs = [each for i, each in enumerate(values) if i - first not in self.given]
        self.graph.output(tuple(outputs) if isinstance(values, tuple) else outputs)
        (outcome,) = self.graph.find_nodes(op="output")
        outcome.meta = dict(node.meta)

    def _meta(self, node: fx.Node) -> dict[str, Any]:
        return {**node.meta, "val": self._value(node.meta.get("val"))}

    def _value(self, value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return type(value)(map(self._value, value))
        return self._tensor(value) if isinstance(value, Tensor) else value

    def _tensor(self, value: Tensor) -> Tensor:
        """A fake tensor in a storage as large as the symbolic one's is for this shape."""
        if value.layout is not torch.strided or is_zero_tensor(value) or value.is_conj() or value.is_neg():
            raise TraceError("A tensor of the step is not one of plain strides")
        sizes, strides = [*map(self._size, value.shape)], [*map(self._size, value.stride())]
        offset = self._size(value.storage_offset())
        size = self._size(value.untyped_storage().nbytes())
        tensor = torch.empty_strided(sizes, strides, dtype=value.dtype, device="meta")
        if tensor.untyped_storage().nbytes() != size:
            tensor.untyped_storage().resize_(size)
        if offset:
            tensor = tensor.as_strided(sizes, strides, offset)
        fake: Any = FakeTensor
        return fake(self.mode, tensor, value.device)

    def _size(self, size: int | torch.SymInt) -> int:
        if isinstance(size, int):
            return size
        expression = expression_of(size)
        if expression not in self.known:
            self.known[expression] = value_of(expression, self.symbols)
        return self.known[expression]
