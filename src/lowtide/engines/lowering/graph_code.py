"""Programs as graphs of ATen ops, and as generated Python that frees each result after its last use."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, fx

from lowtide.compat.dispatch import without_modes
from lowtide.compat.dynamo import mark_boxed
from lowtide.compat.fx import bound_forward, box_arguments
from lowtide.compat.operators import schema_of
from lowtide.engines.lowering.host_pool import HostPool, arrived, fetch, offload, release
from lowtide.engines.lowering.pieces import Ports, cut
from lowtide.planning.lowering import Piece
from lowtide.planning.programs.codes import Codes, codes_of
from lowtide.planning.programs.in_place import in_place_form
from lowtide.planning.programs.program import Instruction, Kind, Program, Role, Value
from lowtide.tracing.capture.batchnorm import inputs_of, is_batch_norm, without_statistics
from lowtide.tracing.capture.joint import Joint

_aten: Any = torch.ops.aten
_SAME = (_aten.detach.default, _aten.alias.default)  # where autograd is off


def graphs_of(joint: Joint, program: Program) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The forward and the backward graph of a program, as AOTAutograd wants them."""
    forward = forward_graph(joint, program, program.kept)
    backward = GraphWriter(joint)
    for cell in program.kept:
        backward.take(cell, f"kept_{value_name(cell)}", joint.nodes[cell.op].meta)
    for node in joint.tangents:
        backward.take(Value(node.name), node.name, node.meta)
    for instruction in program.backward:
        backward.write(instruction)
    backward.graph.output(tuple(None if cell is None else backward.now[cell] for cell in program.gradients))
    return forward, fx.GraphModule(joint.module, backward.graph)


def forward_graph(
    joint: Joint, program: Program, saved: Iterable[Value], pool: HostPool | None = None
) -> fx.GraphModule:
    """Code of the forward pass. With a pool, its first argument is a lease of it."""
    forward = GraphWriter(joint, pool is not None)
    if pool is not None:
        forward.take_lease()
    for node in joint.primals:
        forward.take(Value(node.name), node.name, node.meta)
    states = {cell.op for cell in program.kept if cell.is_state}
    for instruction in program.forward:
        forward.write(instruction, saves_state=instruction.value.op in states)
    for amount in dict.fromkeys(amount for _, amount in joint.counters):
        counters = [forward.now[Value(node.name)] for node, by in joint.counters if by == amount]
        forward.graph.call_function(_aten._foreach_add_.Scalar, (counters, amount))
    outputs = [forward.now[Value(node.name)] if isinstance(node, fx.Node) else node for node in joint.outputs]
    forward.graph.output((*outputs, *(forward.now[cell] for cell in saved)))
    return fx.GraphModule(joint.module, forward.graph)


def pieces_of(joint: Joint, program: Program, *, pooled: bool = False) -> list[Piece]:
    """The backward pass as generated Python, cut where it returns gradients."""
    fetched = {each.value for each in program.backward if each.kind is Kind.FETCH}

    def code(piece: list[Instruction], taken: list[Value], left: list[Value]) -> Callable[[list[Any]], Any]:
        writer = GraphWriter(joint, pooled)
        writer.fetched.update(fetched)
        for cell in taken:
            writer.take(cell, f"given_{value_name(cell)}", joint.nodes[cell.op].meta)
        for each in piece:
            writer.write(each)
        returned = [writer.tensor(each.reads[0]) for each in piece if each.kind is Kind.RETURN_GRAD]
        writer.graph.output((*returned, [writer.now[cell] for cell in left]))
        return boxed(fx.GraphModule(joint.module, writer.graph), keeps_graph=False)

    steps = [e for e in program.backward if e.kind is not Kind.FREE and (e.reads or e.kind is not Kind.RETURN_GRAD)]
    return cut(joint, steps, _ports, code)


def _ports(each: Instruction) -> Ports:
    returns = each.kind is Kind.RETURN_GRAD
    return Ports(each.reads, () if returns else (each.value,), (each.value,) if returns else ())


class GraphWriter:
    """Write instructions as nodes. fx frees each result after its last use, where the program frees it."""

    def __init__(self, joint: Joint, pooled: bool = False) -> None:
        self.graph = fx.Graph()
        self.now: dict[Value, fx.Node] = {}
        self._joint = joint
        self.fetched: set[Value] = set()  # from a pool
        self._pooled = pooled  # whether copies on the host lie in a pool
        self._lease: fx.Node | None = None
        self._offloaded: dict[Value, fx.Node] = {}
        self._arrived: dict[Value, fx.Node] = {}
        self._nodes: dict[str, Any] = joint.nodes  # pyright: ignore[reportAttributeAccessIssue]
        self._fake = next((node.meta["val"].fake_mode for node in joint.primals if "val" in node.meta), None)

    def take(self, cell: Value, name: str, meta: dict[str, Any]) -> None:
        self.now[cell] = self.graph.placeholder(name)
        self.now[cell].meta = {**meta, "val": self._fake_state()} if cell.is_state else dict(meta)
        if cell.role is Role.CODES:
            self.now[cell].meta["val"] = self._codes[self._nodes[cell.op]].value

    def write(self, instruction: Instruction, *, saves_state: bool = False) -> None:
        cell = instruction.value
        if instruction.kind is Kind.FREE and cell in self._offloaded:
            self.graph.call_function(release, (self._offloaded.pop(cell),))
        if instruction.kind in (Kind.FREE, Kind.RETURN_GRAD) or cell.is_state:
            return
        node = self._nodes[cell.op]
        if instruction.kind in (Kind.OFFLOAD, Kind.FETCH):
            self._copy(instruction, node)
            return
        if instruction.kind in (Kind.ENCODE, Kind.DECODE):
            self._code(instruction, node)
            return
        again = instruction.kind is Kind.RECOMPUTE
        read = {
            value: self.tensor(source)
            for value, source in zip(inputs_of(node, again=again), instruction.reads, strict=False)
        }
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda value: read.get(value))
        if node.target in _SAME:
            self.now[cell] = args[0]
            return
        if saves_state:
            both = self.graph.call_function(_run_and_save_state, (node.target, *args), kwargs)
            state = self.graph.call_function(operator.getitem, (both, 0))
            state.meta["val"] = self._fake_state()
            self.now[Value(cell.op, role=Role.STATE)] = state
            result = self.graph.call_function(operator.getitem, (both, 1))
        elif instruction.reads and instruction.reads[-1].is_state:
            result = self.graph.call_function(
                _run_with_state, (self.now[instruction.reads[-1]], node.target, *args), kwargs
            )
        elif again and is_batch_norm(node):
            result = self.graph.call_function(*without_statistics(node.target, args))
        elif instruction.into is not None:
            result = self._write_over(node, args, kwargs, self.tensor(instruction.into))
        else:
            result = self.graph.node_copy(node, lambda value: read[value])
        result.meta = dict(node.meta)
        self.now[cell] = result

    def take_lease(self) -> None:
        """Take a lease of the host's pool as the first argument."""
        self._lease = self.graph.placeholder("lease")

    def tensor(self, cell: Value) -> fx.Node:
        """A value as ops read it: of a fetched one, the tensor when its copy is done."""
        if not self._pooled or cell not in self.fetched:
            return self.now[cell]
        if cell not in self._arrived:
            self._arrived[cell] = self.graph.call_function(arrived, (self.now[cell],))
        return self._arrived[cell]

    def _copy(self, instruction: Instruction, node: fx.Node) -> None:
        source, is_offload = instruction.reads[0], instruction.kind is Kind.OFFLOAD
        if not self._pooled:
            device = node.meta["val"].device
            copy = self.graph.call_function(_to_host if is_offload else _to_device, (self.now[source], device))
        elif is_offload:
            copy = self.graph.call_function(offload, (self._lease, self.now[source], instruction.value.name))
            self._offloaded[source] = copy
        else:
            copy = self.graph.call_function(fetch, (self.now[source],))
            self.fetched.add(instruction.value)
        copy.meta = dict(node.meta)
        self.now[instruction.value] = copy

    def _code(self, instruction: Instruction, node: fx.Node) -> None:
        is_encode = instruction.kind is Kind.ENCODE
        op = self._codes[node].encode if is_encode else self._coded[node]
        read = tuple(self.tensor(cell) for cell in instruction.reads)
        result = self.graph.call_function(cast(Any, op.target), (*read, op.args[-1]))  # then the codebook's key
        result.meta = dict(op.meta)
        self.now[instruction.value] = result

    @cached_property
    def _codes(self) -> dict[fx.Node, Codes]:
        return codes_of(self._joint)

    @cached_property
    def _coded(self) -> dict[fx.Node, fx.Node]:
        return {reader: op for codes in self._codes.values() for reader, op in codes.decode.items()}

    def _write_over(self, node: fx.Node, args: Any, kwargs: Any, into: fx.Node) -> fx.Node:
        form = in_place_form(node)
        if schema_of(form).overload_name == "grad_input":
            return self.graph.call_function(form, args, {**kwargs, "grad_input": into})
        first, *rest = args
        args = (first, *rest) if first is into else (into, first)  # a sum or a product of two
        return self.graph.call_function(form, args, kwargs)

    def _fake_state(self) -> Any:
        with without_modes():
            state = torch.get_rng_state()
        return self._fake.from_tensor(state) if self._fake is not None else state


def value_name(cell: Value) -> str:
    return f"{cell.op}_{cell.run}_{cell.role}"


def _to_host(value: Tensor, device: torch.device) -> Tensor:
    """Copy a value densely to the host, into pinned memory for a GPU."""
    copy = torch.empty_like(value, device="cpu", pin_memory=device.type == "cuda")
    return copy.copy_(value, non_blocking=True)  # on the stream that will fetch it, so nothing need wait


def _to_device(value: Tensor, device: torch.device) -> Tensor:
    return torch.empty_like(value, device=device).copy_(value, non_blocking=True)


def _run_and_save_state(op: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
    """Run a random op; return its generator's state before it and its result."""
    device = _drawn_on(args, kwargs)
    state = torch.get_rng_state() if device is None else torch.cuda.get_rng_state(device)
    return state, op(*args, **kwargs)


def _run_with_state(state: Tensor, op: Any, *args: Any, **kwargs: Any) -> Any:
    """Repeat a random op's first result; leave the generator unchanged."""
    device = _drawn_on(args, kwargs)
    # Not by torch.get_rng_state, which traces watch: this one is the kernel's own, as it were.
    now = torch.default_generator.get_state() if device is None else torch.cuda.get_rng_state(device)
    _set_state(state, device)
    try:
        return op(*args, **kwargs)
    finally:
        _set_state(now, device)


def _set_state(state: Tensor, device: torch.device | None) -> None:
    if device is None:
        torch.set_rng_state(state)
    else:
        torch.cuda.set_rng_state(state, device)


def _drawn_on(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.device | None:
    """The GPU that an op runs on; None for the CPU."""
    devices = [arg.device for arg in args if isinstance(arg, Tensor)]
    devices += [torch.device(kwargs["device"])] if kwargs.get("device") is not None else []
    return next((device for device in devices if device.type == "cuda"), None)


def boxed(module: fx.GraphModule, *, keeps_graph: bool = True) -> Callable[[list[Any]], Any]:
    """Take arguments in a list and empty it, so that they are freed after their last use too.

    Code that runs needs no graph, whose nodes hold a fake tensor each.
    """
    box_arguments(module.graph)
    forward = bound_forward(module.graph)
    if not keeps_graph:
        module.graph = fx.Graph()

    def run(args: list[Any]) -> Any:
        return forward(module, args)

    mark_boxed(run)
    return run
