"""The ``graph`` engine: a program as two graphs of ATen ops, which run behind autograd and let go of each result early.

The loss is captured by Dynamo and AOTAutograd, and runs as a function of torch's own: parameters' hooks, ``zero_grad``,
accumulation, autocast, clipping and optimizers are as before. Ops are those of the plain step, so are the bits.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._guards import detect_fake_mode
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state
from torch.fx.graph import _BoxedCodeGen
from torch.utils._python_dispatch import _disable_current_modes

from lowtide.planning.program import Cell, Instruction, Kind, Program, inputs_of
from lowtide.tracing.joint import Joint, is_batch_norm
from lowtide.workload import Workload

_aten: Any = torch.ops.aten
Planner = Callable[[Joint], Program]


def planned_loss(work: Workload, planner: Planner) -> Callable[[Any], Tensor]:
    """The step's loss as a function of the batch, run by the program that ``planner`` makes of its joint graph."""

    def partition(module: fx.GraphModule, _: Any, *, num_fwd_outputs: int, **__: Any) -> tuple[Any, Any]:
        joint = Joint(module, num_fwd_outputs)
        return graphs_of(joint, planner(joint))

    backend = aot_autograd(fw_compiler=_boxed, bw_compiler=_boxed, partition_fn=partition)
    return torch.compile(lambda batch: work.compute_loss(batch=batch), backend=backend, dynamic=False, fullgraph=True)


def graphs_of(joint: Joint, program: Program) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The forward and the backward graph of a program, as AOTAutograd wants them."""
    forward, backward = _Graph(joint), _Graph(joint)
    for node in joint.primals:
        forward.take(Cell(node.name), node.name, node.meta)
    states = {cell.op for cell in program.kept if cell.is_state}
    for instruction in program.forward:
        forward.write(instruction, saves_state=instruction.cell.op in states)
    outputs = [forward.now[Cell(node.name)] if isinstance(node, fx.Node) else node for node in joint.outputs]
    forward.graph.output((*outputs, *(forward.now[cell] for cell in program.kept)))
    for cell in program.kept:
        backward.take(cell, f"kept_{cell.op}{'_state' * cell.is_state}", forward.now[cell].meta)
    for node in joint.tangents:
        backward.take(Cell(node.name), node.name, node.meta)
    for instruction in program.backward:
        backward.write(instruction)
    backward.graph.output(tuple(None if cell is None else backward.now[cell] for cell in program.gradients))
    return fx.GraphModule(joint.module, forward.graph), fx.GraphModule(joint.module, backward.graph)


class _Graph:
    """Writes instructions as nodes. fx lets go of each result after its last use, which is where a program frees."""

    def __init__(self, joint: Joint) -> None:
        self.graph = fx.Graph()
        self.now: dict[Cell, fx.Node] = {}
        self._nodes = {node.name: node for node in joint.module.graph.nodes}
        self._fake = detect_fake_mode([node.meta.get("val") for node in joint.primals])

    def take(self, cell: Cell, name: str, meta: dict[str, Any]) -> None:
        self.now[cell] = self.graph.placeholder(name)
        self.now[cell].meta = dict(meta)

    def write(self, instruction: Instruction, *, saves_state: bool = False) -> None:
        cell = instruction.cell
        if instruction.kind is Kind.FREE or cell.is_state:
            return
        node = self._nodes[cell.op]
        again = instruction.kind is Kind.RECOMPUTE
        read = {
            value: self.now[found]
            for value, found in zip(inputs_of(node, again=again), instruction.reads, strict=False)
        }
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda value: read.get(value))
        if saves_state:
            both = self.graph.call_function(run_and_save_rng_state, (node.target, *args), kwargs)
            state = self.graph.call_function(operator.getitem, (both, 0))
            state.meta["val"] = self._fake_state()
            self.now[Cell(cell.op, is_state=True)] = state
            made = self.graph.call_function(operator.getitem, (both, 1))
        elif instruction.reads and instruction.reads[-1].is_state:
            made = self.graph.call_function(
                run_with_rng_state, (self.now[instruction.reads[-1]], node.target, *args), kwargs
            )
        elif again and is_batch_norm(node):
            made = self.graph.call_function(_aten._native_batch_norm_legit.no_stats, (*args[:3], *args[5:]))
        else:
            made = self.graph.node_copy(node, lambda value: read[value])
        made.meta = dict(node.meta)
        self.now[cell] = made

    def _fake_state(self) -> Any:
        with _disable_current_modes():
            state = torch.get_rng_state()
        return self._fake.from_tensor(state) if self._fake is not None else state


def _boxed(module: fx.GraphModule, _: Any) -> Callable[[list[Any]], Any]:
    """Takes its arguments in a list, which it empties: they too are let go after their last use."""
    module.graph.set_codegen(_BoxedCodeGen())
    module.recompile()

    def run(args: list[Any]) -> Any:
        return module.forward(args)

    run._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]
    return run
