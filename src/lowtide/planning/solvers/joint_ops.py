"""A joint graph as numbered ops and values, and runs of these ops as an order of the graph's nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx

from lowtide.planning.programs.codes import Codes, gradient_of
from lowtide.planning.programs.in_place import lies_like, written_over
from lowtide.planning.programs.program import Kind, Program
from lowtide.planning.programs.writer import STATE_BYTES, write
from lowtide.planning.solvers.runs import Hold, Ops, RunTimeline
from lowtide.tracing.capture.batchnorm import inputs_of
from lowtide.tracing.capture.joint import Joint, bytes_of, is_item, is_random, size_of, viewed

_SMALL = 0.02  # of an op's results: such a part stays on the device


class JointOps:
    """Kernels of a joint graph. Views belong to the storages that they show, and cost nothing."""

    def __init__(
        self,
        joint: Joint,
        seconds: Callable[[fx.Node], float],
        workspace: Callable[[fx.Node], int] = lambda _: 0,
        *,
        holds_gradients: bool = True,
    ) -> None:
        self.joint, self.holds_gradients = joint, holds_gradients
        forward = [node for node in joint.forward if _is_kernel(node)]
        self.nodes = [*forward, *(node for node in _backward_order(joint) if _is_kernel(node))]
        self.op_of: dict[fx.Node, int] = {}  # of each storage
        self.value_of: dict[fx.Node, int] = {}
        sizes: list[int] = []
        self.makes = [self._values(op, node, sizes) for op, node in enumerate(self.nodes)]
        self.ops = Ops(
            reads=tuple(self._reads(op, node, len(forward)) for op, node in enumerate(self.nodes)),
            makes=tuple(self.makes),
            bytes=tuple(sizes),
            seconds=tuple(max(0.0, float(seconds(node))) for node in self.nodes),
            backward=len(forward),
            repeatable=frozenset(op for op, node in enumerate(self.nodes) if self._is_repeatable(node)),
            held=frozenset(value for value in map(self._value, self._held()) if value is not None),
            workspace=tuple(map(workspace, self.nodes)),
            over=tuple(map(self._over, self.nodes)),
        )

    def program(self, timeline: RunTimeline, codes: Mapping[int, Codes] = MappingProxyType({})) -> Program:
        """The program of runs. ``codes`` are those of stores that take some."""
        released: dict[fx.Node, fx.Node] = {}
        encoded: dict[Codes, fx.Node] = {}
        for run, turn in zip(timeline.runs, timeline.before, strict=True):
            hold = timeline.ops.stores.get(run)
            if hold is not None and hold.readers:
                encoded[codes[run]] = self.nodes[turn - 1]
            elif hold is not None:
                released.update((self.node_of[value], self.nodes[turn - 1]) for value in hold.values)
        return write(self.joint, list(_NodeOrder(self, timeline).backward()), released, encoded)

    @cached_property
    def node_of(self) -> dict[int, fx.Node]:
        """By value: the node of its storage."""
        return {value: node for node, value in self.value_of.items()}

    def offloadable(self, op: int) -> tuple[int, ...]:
        """Results of a forward op that may wait on the host: large ones, that fill their memory."""
        values = [value for value in self.makes[op] if value in self.node_of and value not in self.ops.held]
        large = [value for value in values if self.ops.bytes[value] > _SMALL * self.ops.size[op]]
        node = self.nodes[op]
        if node in self.joint.copies or self._is_constant(node):
            return ()
        return tuple(value for value in large if is_dense(self.node_of[value].meta.get("val")))

    def _values(self, op: int, node: fx.Node, sizes: list[int]) -> tuple[int, ...]:
        """Number the values that an op makes."""
        results = node.meta.get("val")
        storages = [node]
        if isinstance(results, (tuple, list)):
            storages = [user for user in node.users if is_item(user)]
            self.op_of[node] = op
        first = len(sizes)
        for storage in storages:
            self.op_of[storage], self.value_of[storage] = op, len(sizes)
            sizes.append(bytes_of(storage))
        if isinstance(results, (tuple, list)):  # results that nobody reads
            sizes.append(sum(map(size_of, results)) - sum(sizes[first:]))
        return tuple(range(first, len(sizes)))

    def _value(self, node: fx.Node) -> int | None:
        return self.value_of.get(self.joint.storages[node])

    def _reads(self, op: int, node: fx.Node, forward: int) -> tuple[int, ...]:
        nodes = list(node.all_input_nodes)
        if op == forward - 1:  # new values of buffers go into them when forward is done
            nodes += [value for value in self.joint.outputs if isinstance(value, fx.Node)]
        values = dict.fromkeys(self._value(value) for value in nodes)
        return tuple(value for value in values if value is not None and value not in self.makes[op])

    def _is_repeatable(self, node: fx.Node) -> bool:
        if node in self.joint.copies or node in self.joint.gradients or self._is_constant(node):
            return False
        if is_random(node) and bytes_of(node) < 2 * STATE_BYTES:
            return False
        return self.joint.is_forward(node) or node in self.joint.prepared

    def _is_constant(self, node: fx.Node) -> bool:
        """Tell whether an op reads constants of the graph alone. They live anyway: recomputing it saves nothing."""
        inputs = node.all_input_nodes
        return node.op == "get_attr" or (bool(inputs) and all(map(self._is_constant, inputs)))

    def _held(self) -> Iterator[fx.Node]:
        """Results that live to the end."""
        yield self.joint.loss
        yield from self.joint.stored
        if self.holds_gradients:
            yield from (node for node in self.joint.gradients if isinstance(node, fx.Node))

    def _over(self, node: fx.Node) -> tuple[int, ...]:
        storages = [self.joint.storages[value] for value in node.all_input_nodes]
        values = [
            self._value(value)
            for value in written_over(node)
            if lies_like(value.meta.get("val"), node.meta.get("val"))
            and storages.count(self.joint.storages[value]) == 1
        ]
        return tuple(value for value in values if value is not None)


def is_dense(value: Any) -> bool:
    """Tell whether a tensor fills its storage, in whatever order."""
    whole = isinstance(value, Tensor) and value.numel() * value.element_size() == size_of(value)
    return whole and (value.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense.default(value))


def _is_kernel(node: fx.Node) -> bool:
    return viewed(node) is None and not is_item(node)


def _backward_order(joint: Joint) -> list[fx.Node]:
    """Ops of the backward pass, with those that wait for no gradient right before their first readers."""
    ordered: dict[fx.Node, None] = {}
    for target in joint.backward:
        if target in joint.prepared and target not in joint.gradients:
            continue
        waiting = [target]
        while waiting:
            node = waiting[-1]
            missing = [v for v in node.all_input_nodes if v in joint.prepared and v not in ordered]
            if missing and node not in ordered:
                waiting += missing
            else:
                ordered.setdefault(waiting.pop())
    return list(ordered)


class _NodeOrder:
    """Walk runs, and list nodes: kernels, their several results, and views when they are first read."""

    def __init__(self, kernels: JointOps, timeline: RunTimeline) -> None:
        self.kernels, self.joint, self.timeline = kernels, kernels.joint, timeline
        self.latest: dict[fx.Node, int] = {}  # by storage: the latest run in backward that made it
        self.shows: dict[fx.Node, int] = {}  # by view: the run that made its storage

    def backward(self) -> Iterator[tuple[fx.Node, Kind]]:
        """Nodes of the backward pass, with how they run."""
        nodes = self.kernels.nodes
        first = self.kernels.ops.backward  # no op of the forward pass runs again in it
        start = self.timeline.starts[first] if first < len(self.kernels.ops) else len(self.timeline.runs)
        for node in self.joint.forward:
            self.shows[node] = self._run_of(node)
        gradients: dict[int, list[fx.Node]] = {}
        for node in self.joint.gradients:
            if isinstance(node, fx.Node):
                gradients.setdefault(self._op_of(node), []).append(node)
        coded = {reader: gradient_of(nodes[reader]) for hold in self.timeline.coded for reader in hold.readers}
        for place in range(start, len(self.timeline.runs)):
            op, turn = self.timeline.runs[place], self.timeline.before[place]
            if op in self.timeline.ops.stores:
                continue
            if (hold := self.timeline.ops.loads.get(op)) is not None:
                yield from self._loaded(hold, place)
                continue
            node = nodes[op]
            for value in inputs_of(node, again=op != turn) if op not in coded else [coded[op]]:
                yield from self._shown(value)
            kind = Kind.DECODE if op in coded else Kind.COMPUTE if op == turn else Kind.RECOMPUTE
            yield node, kind
            self.shows[node] = self.latest[node] = place
            for item in node.users:
                if is_item(item) and viewed(item) is None:
                    yield item, kind
                    self.shows[item] = self.latest[item] = place
            for value in gradients.get(op, ()) if op == turn else ():
                yield from self._shown(value)
        for value in gradients.get(-1, ()):
            yield from self._shown(value)

    def _loaded(self, hold: Hold, place: int) -> Iterator[tuple[fx.Node, Kind]]:
        for value in hold.values:
            node = self.kernels.node_of[value]
            if self.timeline.is_read[value, place]:
                yield node, Kind.FETCH
                self.shows[node] = self.latest[node] = place

    def _op_of(self, node: fx.Node) -> int:
        return self.kernels.op_of.get(self.joint.storages[node], -1)

    def _run_of(self, node: fx.Node) -> int:
        return self.latest.get(self.joint.storages[node], -1)

    def _shown(self, node: fx.Node) -> Iterator[tuple[fx.Node, Kind]]:
        """Views on the latest run of a storage, down to the one that is read."""
        waiting = [node]
        while waiting:
            view = waiting[-1]
            if view.op == "placeholder" or self.shows.get(view) == self._run_of(view):
                waiting.pop()
                continue
            missing = [
                v for v in view.all_input_nodes if v.op != "placeholder" and self.shows.get(v) != self._run_of(v)
            ]
            if missing:
                waiting += missing
                continue
            yield view, Kind.RECOMPUTE if view in self.shows else Kind.COMPUTE
            self.shows[view] = self._run_of(view)
            waiting.pop()
