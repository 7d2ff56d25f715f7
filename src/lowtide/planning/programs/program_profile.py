"""Turn a program into a traced step, so that reports and budgets read it like a trace."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from lowtide.errors import TraceError
from lowtide.planning.programs.codes import Codes, codes_of
from lowtide.planning.programs.in_place import in_place_form
from lowtide.planning.programs.offloading import HostLink, stalls
from lowtide.planning.programs.program import Cost, Instruction, Kind, Program, Role, Value
from lowtide.planning.programs.writer import STATE_BYTES
from lowtide.profiling import Profile
from lowtide.profiling.devices import find_device
from lowtide.profiling.kernels import Workspaces, modelled_workspace, seconds_alone
from lowtide.profiling.roofline import op_seconds
from lowtide.registry import NEEDS_NO_CAPTURE
from lowtide.tracing.call_sites import short_name
from lowtide.tracing.capture.joint import Joint, is_item, is_random, module_of, size_of
from lowtide.tracing.dense_parts import dtype_name, flatten, leaves
from lowtide.tracing.graph import STATIC, Category, Graph, Op, Storage, TensorView, handed_on, signature
from lowtide.tracing.op_calls import Call

_KERNELS = {"aten._native_batch_norm_legit": "aten.native_batch_norm"}  # a captured op, and the plain step's kernel


class Forecast:
    """Turn programs over one joint graph into traced steps, with workspaces and seconds of the plain step.

    Ops that the plain step ran have its seconds and workspaces. Other ops are measured alone where they can run here,
    and modelled elsewhere.
    """

    def __init__(self, joint: Joint, plain: Profile) -> None:
        self.joint, self.plain = joint, plain
        self.optimizer_start = plain.graph.phase_starts().get("optimizer", len(plain.graph.ops))

    def profile(self, program: Program) -> Profile:
        """The planned step, as if it had been traced."""
        return replace(self.plain, graph=self.graph(program))

    def graph(self, program: Program) -> Graph:
        """The ops and storages of a planned step; the optimizer's are the plain step's."""
        return _Planned(self, program).graph()

    def seconds(self, node: fx.Node) -> float:
        """Seconds of one op of the joint graph, or of one that takes or reads codes."""
        return 0.0 if self._is_free(node) else self.cost_of(node).seconds

    def workspace(self, node: fx.Node) -> int:
        """Workspace bytes of one op of the joint graph, or of one that takes or reads codes."""
        return 0 if self._is_free(node) else self.cost_of(node).workspace_bytes

    def run(self, each: Instruction) -> fx.Node | None:
        """The op that an instruction runs; None where it runs none."""
        node = self.joint.nodes.get(each.value.op)
        if node is None or each.value.is_state:
            return None
        if each.kind is Kind.ENCODE:
            return self.codes[node].encode
        if each.kind is Kind.DECODE:
            return next(codes.decode[node] for codes in self.codes.values() if node in codes.decode)
        return node if each.kind in (Kind.COMPUTE, Kind.RECOMPUTE) and not is_free(self.joint, node) else None

    @cached_property
    def codes(self) -> dict[fx.Node, Codes]:
        """Codes that may stand for results, by node."""
        return codes_of(self.joint)

    def _is_free(self, node: fx.Node) -> bool:
        return node in self.joint.storages and is_free(self.joint, node)

    def cost_of(self, node: fx.Node) -> _OpCost:
        """The op that a node runs, with its cost."""
        return self.costs[node.name] if node in self.joint.storages else self._code_costs[_op(node).signature]

    @cached_property
    def _code_costs(self) -> Mapping[str, _OpCost]:
        """Seconds and workspace of ops that take or read codes, by signature."""
        nodes = [node for codes in self.codes.values() for node in (codes.encode, *codes.decode.values())]
        return self._costs({_op(node).signature: node for node in nodes})

    @cached_property
    def host(self) -> HostLink | None:
        """The way to the host's memory; None where that is the device's own."""
        graph = self.plain.graph
        return None if graph.tensor_device == "cpu" else HostLink.of(find_device(graph.device))

    def cost(self, each: Instruction) -> Cost:
        """Seconds and workspace of an instruction that runs an op."""
        node = self.run(each)
        return Cost() if node is None else Cost(self.seconds(node), self.workspace(node))

    @cached_property
    def costs(self) -> Mapping[str, _OpCost]:
        """Seconds and workspace of each op, by its node's name."""
        return self._costs({name: node for name, node in self.joint.nodes.items() if not is_free(self.joint, node)})

    def _costs(self, nodes: Mapping[str, fx.Node]) -> Mapping[str, _OpCost]:
        """Seconds and workspace of ops, by name."""
        ops = {name: _op(node) for name, node in nodes.items()}
        known = _Known(self.plain)
        unknown = {op.signature: name for name, op in ops.items() if not known.knows(op)}
        known.measure({key: _call(nodes[name]) for key, name in unknown.items()})
        untimed = {op.signature: name for name, op in ops.items() if not known.has_timed(op)}
        known.time({key: _call(nodes[name]) for key, name in untimed.items()})
        return {name: known.cost(op) for name, op in ops.items()}


def check_results(joint: Joint, plain: Profile) -> None:
    """Raise ``TraceError`` if an op of the plain step returned another result than its fake kernel.

    A captured graph takes sizes from fake kernels. If a real result has another layout, ops after it may fail. If its
    storage is larger, a program would take more than its bytes.
    """
    graph = plain.graph
    layouts: dict[str, list[Any]] = {}
    sizes: dict[str, list[list[int]]] = {}
    for op in graph.ops:
        own = [s.bytes for s in (graph.storages[v.storage] for v in op.outputs) if s.birth == op.index]
        layouts.setdefault(op.signature, []).append([*map(_layout, op.outputs)])
        if len(own) == len(op.outputs):  # none is a view
            sizes.setdefault(op.signature, []).append(own)
    for node in joint.nodes.values():
        if is_free(joint, node):
            continue
        op = _op(node)
        layout, size = [*map(_layout, op.outputs)], [*map(size_of, leaves(node.meta.get("val")))]
        if layout not in layouts.get(op.signature, [layout]) or size not in sizes.get(op.signature, [size]):
            raise TraceError(
                f"{short_name(op.name)} gives another result here than torch says: its program would not be true",
                hint=NEEDS_NO_CAPTURE,
            )


def _layout(value: TensorView) -> tuple[Any, ...]:
    strides = tuple(stride if size > 1 else 0 for size, stride in zip(value.shape, value.stride, strict=True))
    return value.shape, strides, value.dtype


def node_seconds(joint: Joint, device: str) -> Callable[[fx.Node], float]:
    """Modelled seconds of each op of a joint graph, by the roofline of a device."""
    described = find_device(device)
    return lambda node: 0.0 if is_free(joint, node) else op_seconds(_op(node), described)


def node_workspaces(joint: Joint, device: str) -> Callable[[fx.Node], int]:
    """Workspace bytes of each op of a joint graph: looked up, measured alone, or modelled."""
    nodes = [node for node in joint.nodes.values() if not is_free(joint, node)]
    known = Workspaces(Graph((), (), (), (), device, fake=True))
    ops = {node: _op(node) for node in nodes}
    known.measure({op.signature: _call(node) for node, op in ops.items()})
    sizes = {node: (known.get(op.signature), op) for node, op in ops.items()}
    models = device != "cpu"
    bytes_of = {node: (modelled_workspace(op) if models else 0) if size is None else size
                for node, (size, op) in sizes.items()}  # fmt: skip
    return lambda node: bytes_of.get(node, 0)


def is_free(joint: Joint, node: fx.Node) -> bool:
    """Whether it is a view or one of several results: no kernel runs, and nothing is allocated."""
    return is_item(node) or node.op != "call_function" or joint.storages[node] is not node


def _op(node: fx.Node) -> Op:
    """An op of a joint graph as a trace would show it."""
    args, kwargs = _arguments(node)
    tensors, arguments = flatten(tuple(args), dict(kwargs))
    outputs = tuple(map(_value, leaves(node.meta.get("val"))))
    return Op(
        0,
        str(node.target),
        "forward",
        module_of(node),
        "",
        tuple(map(_value, tensors)),
        outputs,
        arguments,
        False,
        0.0,
        0,
    )


def _arguments(node: fx.Node) -> Any:
    return fx.map_arg((node.args, node.kwargs), lambda value: value.meta.get("val"))


@dataclass(frozen=True, slots=True)
class _OpCost:
    op: Op
    seconds: float
    workspace_bytes: int


class _Known:
    """Seconds and workspaces of the plain step's ops."""

    def __init__(self, plain: Profile) -> None:
        graph = plain.graph
        self.device = find_device(graph.device)
        self.here = graph.tensor_device == "cpu" or torch.cuda.is_available()
        self.tensor_device = graph.tensor_device
        self._seconds: dict[str, list[float]] = {}
        for op in graph.ops:
            for key in _keys(op):
                self._seconds.setdefault(key, []).append(op.seconds)
        seen = ((key, op.workspace_bytes) for op in graph.ops for key in _keys(op))
        self._workspaces = Workspaces(graph, seen=seen, from_table=plain.workspace_source != "none")
        self._is_timed = plain.seconds_source == "measured"
        modelled = sum(op_seconds(op, self.device) for op in graph.ops)
        self._scale = plain.seconds / modelled if modelled and math.isfinite(plain.seconds) else 1.0

    def knows(self, op: Op) -> bool:
        """Whether an op's workspace is known: the plain step ran the same, or a table has it."""
        return self._workspaces.get(op.signature) is not None

    def measure(self, calls: Mapping[str, Call]) -> None:
        """Run ops alone, by signature, where they can run here."""
        if self.here:
            self._workspaces.measure(calls)

    def has_timed(self, op: Op) -> bool:
        """Whether the plain step ran the same, or almost."""
        return any(key in self._seconds for key in _keys(op))

    def time(self, calls: Mapping[str, Call]) -> None:
        """Run ops alone, by signature, where they can run here."""
        if self.here and self._is_timed:
            alone = {key: call for key, call in calls.items() if call.runs_alone}
            alone_seconds = seconds_alone(alone, torch.device(self.tensor_device))
            self._seconds.update({key: [seconds] for key, seconds in alone_seconds.items()})

    def cost(self, op: Op) -> _OpCost:
        return _OpCost(op, self._seconds_of(op), self._workspace_of(op))

    def _workspace_of(self, op: Op) -> int:
        size = self._workspaces.get(*_keys(op))
        if size is not None:
            return size
        return 0 if self.tensor_device == "cpu" else modelled_workspace(op)

    def _seconds_of(self, op: Op) -> float:
        for key in _keys(op):
            if key in self._seconds:
                times = sorted(self._seconds[key])
                return times[len(times) // 2]
        return op_seconds(op, self.device) * self._scale


def _keys(op: Op) -> tuple[str, str]:
    """Look-up keys: the signature, then kernel and results regardless of in-place forms, which captures lack."""
    return op.signature, signature(_KERNELS.get(op.kernel, op.kernel), op.outputs, "results")


def _call(node: fx.Node) -> Call:
    return Call.of(node.target, *_arguments(node))


@dataclass
class _Planned:
    """Walk through a program and record ops and storages."""

    forecast: Forecast
    program: Program
    ops: list[Op] = field(default_factory=list)
    storages: list[Storage] = field(default_factory=list)
    deaths: dict[int, int] = field(default_factory=dict)  # by place in ``storages``; the others outlive backward
    categories: dict[int, Category] = field(default_factory=dict)  # by place, where it is no temporary
    index: dict[Value, int] = field(default_factory=dict)  # by storage: its place in ``storages``
    holders: dict[Value, int] = field(default_factory=dict)

    def graph(self) -> Graph:
        plain, first = self.forecast.plain.graph, self.forecast.optimizer_start
        always = [s for s in plain.storages if s.birth == 0 and s.death == len(plain.ops)]
        statics = [s for s in always if s.category in STATIC or s.category == "workspace"]
        for name, value in self.forecast.joint.constants.items():
            size, device, dtype = size_of(value), value.device.type, dtype_name(value)
            statics.append(Storage(0, size, device, dtype, "buffer", 0, -1, f"constant {name}", "", ""))
        self.storages = list(statics)
        waits = self._waits()
        for phase in ("forward", "backward"):
            for instruction in getattr(self.program, phase):
                if wait := next(waits, 0.0):
                    self.ops.append(Op(len(self.ops), "lowtide.wait", phase, "", "", (), (), "", False, wait, 0))
                self._walk(instruction, phase)
            if phase == "forward":
                self._name(range(len(statics), len(self.storages)), "activation")
        returned = [each.value for each in self.program.backward if each.kind is Kind.RETURN_GRAD and each.reads]
        gradients = {self.index[s] for cell in returned for s in self.program.held(cell) if s in self.index}
        self._name(gradients, "gradient")
        shift = len(self.ops) - first
        end = shift + len(plain.ops)
        walked = [
            replace(s, id=place, death=self.deaths.get(place, end), category=self.categories.get(place, s.category))
            for place, s in enumerate(self.storages)
        ]
        stepping = [s for s in plain.storages if s.birth >= first and s.birth]
        renumbered = {s.id: place for place, s in enumerate(statics) if s.death >= 0}
        renumbered |= {s.id: place for place, s in enumerate(stepping, len(walked))}
        later = [
            replace(s, id=place, birth=s.birth + shift, death=s.death + shift)
            for place, s in enumerate(stepping, len(walked))
        ]
        ops = [
            replace(
                op, index=op.index + shift, inputs=_moved(op.inputs, renumbered), outputs=_moved(op.outputs, renumbered)
            )
            for op in plain.ops[first:]
        ]
        graph = replace(plain, ops=(*self.ops, *ops), storages=(*walked, *later))
        return replace(graph, saved=handed_on(graph))

    def _waits(self) -> Iterator[float]:
        """Seconds that each instruction waits for copies."""
        program, host = self.program, self.forecast.host
        copies = host is not None and any(each.kind is Kind.OFFLOAD for each in program.forward)
        return iter(stalls(program, self.forecast.cost, host) if copies and host is not None else ())

    def _walk(self, each: Instruction, phase: Any) -> None:
        node = self.forecast.joint.nodes.get(each.value.op)
        run = self.forecast.run(each)
        if run is not None and node is not None:
            cost = self.forecast.cost_of(run)
            op, again = cost.op, each.kind is Kind.RECOMPUTE
            name = str(in_place_form(node)) if each.into is not None else op.name
            size = cost.workspace_bytes + self._state_bytes(each, node)
            self.ops.append(
                Op(len(self.ops), name, phase, op.module, "", (), (), op.arguments, again, cost.seconds, size)
            )
        elif each.kind is Kind.RETURN_GRAD and each.value in self.program.bytes and each.reads:
            self.ops.append(Op(len(self.ops), "aten.clone.default", phase, "", "", (), (), "", False, 0.0, 0))
        elif each.kind in (Kind.OFFLOAD, Kind.FETCH):  # beside the ops: those that wait take the seconds
            name = f"lowtide.{each.kind}"
            self.ops.append(Op(len(self.ops), name, phase, "", "", (), (), "", False, 0.0, 0))
        for storage in self.program.held(each.value):
            self._hold(storage, each, node)
            if each.kind is Kind.RETURN_GRAD and self.ops and storage in self.index:
                shown = self.storages[self.index[storage]]  # an output: so that the trace shows where it is complete
                view = TensorView(shown.id, shown.shape, (), shown.dtype)
                self.ops[-1] = replace(self.ops[-1], outputs=(*self.ops[-1].outputs, view))

    def _state_bytes(self, each: Instruction, node: fx.Node) -> int:
        """Bytes of the generator state that a recomputed random op needs, in host memory."""
        on_host = self.forecast.plain.graph.tensor_device == "cpu"
        return STATE_BYTES if on_host and each.kind is Kind.RECOMPUTE and is_random(node) else 0

    def _hold(self, storage: Value, each: Instruction, node: fx.Node | None) -> None:
        size = self.program.bytes.get(storage, 0)
        count = self.holders.get(storage, 0) + (-1 if each.kind is Kind.FREE else 1)
        self.holders[storage] = count
        if not size:
            return
        if count and storage not in self.index:
            result: Any = node.meta.get("val") if node is not None and storage.role is not Role.CODES else None
            shape = tuple(result.shape) if isinstance(result, Tensor) else ()
            dtype = dtype_name(result) if isinstance(result, Tensor) else "uint8"
            on_host = storage.is_state or storage.on_host
            device = "cpu" if on_host else self.forecast.plain.graph.tensor_device
            self.index[storage] = len(self.storages)
            # A returned gradient that reads nothing lives before, as the loss's gradient.
            is_result = each.kind is not Kind.RETURN_GRAD or bool(each.reads)
            birth = max(0, len(self.ops) - is_result)
            op, module = each.value.name, module_of(node) if node is not None else ""
            place, label = len(self.storages), f"{op} {list(shape)}"
            self.storages.append(
                Storage(place, size, device, dtype, "temporary", birth, -1, label, module, "", shape, op)
            )
        elif not count:
            self.deaths[self.index.pop(storage)] = len(self.ops)

    def _name(self, places: Iterable[int], category: Category) -> None:
        """Give a category to the storages that are alive now."""
        self.categories |= {place: category for place in places if place not in self.deaths}


def _value(tensor: Tensor) -> TensorView:
    return TensorView(0, tuple(tensor.shape), tuple(tensor.stride()), dtype_name(tensor))


def _moved(values: tuple[TensorView, ...], places: Mapping[int, int]) -> tuple[TensorView, ...]:
    return tuple(replace(v, storage=places[v.storage]) for v in values if v.storage in places)
