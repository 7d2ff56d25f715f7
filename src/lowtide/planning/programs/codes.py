"""Inputs of activations that backward reads for the derivative alone: a few bits of each stand for them.

An op such as ``gelu_backward(dy, x)`` becomes ``fewbit_decode(dy, codes)``. Activations that are straight on both sides
of their bends, such as ReLU, take one bit, and their gradients keep their bits. Others take three.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from lowtide.compat.dispatch import without_modes
from lowtide.kernels.activations import Activation
from lowtide.kernels.fewbit import is_dense
from lowtide.kernels.reference.fewbit import Codebook, packed_bytes
from lowtide.nn.fewbit import book_for
from lowtide.planning.programs.in_place import lies_like
from lowtide.tracing.capture.joint import Joint, is_item, size_of, viewed

BITS = 3  # of a code that stands for a curve
_SMALLEST = 64  # elements
_aten: Any = torch.ops.aten
_ops: Any = torch.ops.lowtide


@dataclass(frozen=True)
class Codes:
    """The codes of one result, and the ops of backward that can read them in its place.

    ``encode`` and ``decode`` are nodes beside the graph: an op with its arguments.
    """

    source: fx.Node
    book: Codebook
    readers: tuple[fx.Node, ...]

    @property
    def is_exact(self) -> bool:
        """Whether gradients keep their bits."""
        return self.book.activation.is_gate

    @property
    def bytes(self) -> int:
        """Bytes of the codes."""
        return packed_bytes(self.source.meta["val"].numel(), self.book.bits)

    @cached_property
    def value(self) -> Tensor:
        """The codes as a fake tensor."""
        source = self.source.meta["val"]
        with source.fake_mode:
            return source.new_empty(self.bytes, dtype=torch.uint8)

    @cached_property
    def encode(self) -> fx.Node:
        """The op that gives the codes."""
        graph = fx.Graph()
        node = graph.call_function(_ops.fewbit_encode.default, (_twin(graph, self.source), self.book.key))
        node.meta = {**self.source.meta, "val": self.value}
        return node

    @cached_property
    def decode(self) -> Mapping[fx.Node, fx.Node]:
        """By reader: the op that takes its place."""
        decoded: dict[fx.Node, fx.Node] = {}
        for reader in self.readers:
            graph = fx.Graph()
            codes = graph.placeholder("codes")
            codes.meta = {"val": self.value}
            arguments = (_twin(graph, gradient_of(reader)), codes, self.book.key)
            decoded[reader] = graph.call_function(_ops.fewbit_decode.default, arguments)
            decoded[reader].meta = dict(reader.meta)
        return decoded


def codes_of(joint: Joint) -> dict[fx.Node, Codes]:
    """Results that codes can stand for, by node: all of backward reads them for one activation's derivative alone."""
    readers: dict[fx.Node, list[fx.Node]] = {}  # by storage: kernels of backward
    for node in joint.backward:
        if viewed(node) is None and not is_item(node):
            for storage in dict.fromkeys(joint.storages[value] for value in node.all_input_nodes):
                readers.setdefault(storage, []).append(node)
    codes_of: dict[fx.Node, Codes] = {}
    for storage, nodes in readers.items():
        sources = {_source(node) for node in nodes}
        books = {_book(node) for node in nodes}
        source, book = next(iter(sources)), next(iter(books))
        if len(sources) == len(books) == 1 and source is not None and book is not None and joint.is_forward(storage):
            codes = Codes(source, book, tuple(nodes))
            if joint.is_forward(source) and _fits(joint, codes):
                codes_of[source] = codes
    return codes_of


def gradient_of(reader: fx.Node) -> fx.Node:
    """The gradient that an activation's backward reads."""
    gradient = reader.args[0]
    assert isinstance(gradient, fx.Node)
    return gradient


def _fits(joint: Joint, codes: Codes) -> bool:
    """Whether codes of the source take less than it, and each reader's tensors lie as it does."""
    value = codes.source.meta.get("val")
    if not isinstance(value, Tensor) or value.numel() < _SMALLEST or not is_dense(value):
        return False
    alike = (lies_like(gradient_of(reader).meta.get("val"), value) and lies_like(reader.meta.get("val"), value)
             and joint.storages[gradient_of(reader)] is not joint.storages[codes.source]
             for reader in codes.readers)  # fmt: skip
    return codes.bytes < size_of(value) and value.is_floating_point() and all(alike)


def _source(reader: fx.Node) -> fx.Node | None:
    """The tensor that an activation's backward takes the derivative at."""
    source = reader.args[1] if len(reader.args) > 1 else None
    while isinstance(source, fx.Node) and source.target in (_aten.detach.default, _aten.alias.default):
        (source,) = source.args
    gradient = reader.args[0] if reader.args else None
    return source if isinstance(source, fx.Node) and isinstance(gradient, fx.Node) else None


def _book(reader: fx.Node) -> Codebook | None:
    """The codebook of the activation whose backward this is; None for another op."""
    activation = Activation.of_op(reader.target, reader.args, reader.kwargs, gradient=True)
    if activation is None:
        return None
    with without_modes():  # a table is of numbers, also while a step is captured
        return book_for(activation, BITS)


def _twin(graph: fx.Graph, node: fx.Node) -> fx.Node:
    twin = graph.placeholder(node.name)
    twin.meta = dict(node.meta)
    return twin
