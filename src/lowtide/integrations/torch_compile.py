"""``torch.compile(model, backend="lowtide", options={"budget": "6GiB"})``: each captured graph runs by a program.

The backend sees graphs of the model, and neither the loss around them nor the optimizer. So the budget covers
parameters, buffers, inputs, gradients, and all that the graphs hold between forward and backward.
"""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from lowtide.compat.dispatch import without_modes
from lowtide.compat.dynamo import aot_autograd, mark_boxed
from lowtide.engines.lowering.graph_code import boxed, graphs_of
from lowtide.errors import BudgetError, PlanError
from lowtide.planning.budget import resolve_budget
from lowtide.planning.programs.program import Cost, Instruction, Kind, Program, simulate
from lowtide.planning.programs.program_profile import node_seconds, node_workspaces
from lowtide.planning.solvers.solver import Problem, solutions
from lowtide.sizes import format_size
from lowtide.tracing.capture.decompositions import plain_composites
from lowtide.tracing.capture.joint import Joint
from lowtide.tracing.fake.kernel_dispatch import replaced_kernels
from lowtide.tracing.fake.kernels import FIXES, SUBSTITUTES
from lowtide.tracing.meter import CudaMeter

_log = logging.getLogger("lowtide")
_in_flight: dict[int, list[weakref.ref[Any]]] = {}  # by compiled model: storages that its graphs hold for backward

_EXAMPLE = 'torch.compile(model, backend="lowtide", options={"budget": "6GiB"})'


def backend(module: fx.GraphModule, inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None) -> Any:
    """Plan one graph of Dynamo's, and return what runs it. Graphs without gradients run as they are.

    Raises ``BudgetError`` if no program fits, and ``PlanError`` where the model is captured as several graphs.
    """
    unknown = [name for name in options or () if name != "budget"]
    if unknown:
        raise PlanError(f"lowtide's backend has no option {unknown[0]!r}", hint=f"Write {_EXAMPLE}.")
    if not options or "budget" not in options:
        raise PlanError("lowtide's backend needs a budget", hint=f"Write {_EXAMPLE}.")
    if options["budget"] != "device":
        resolve_budget(options["budget"], 0, "cpu")  # or raise
    graph = _PlannedGraph(module, options["budget"], id(options))
    return graph if any(isinstance(each, torch.SymInt) for each in inputs) else graph.traced(inputs)


class _PlannedGraph:
    """A graph of Dynamo's. With symbols for sizes, each shape is traced from it and planned when it is first met."""

    def __init__(self, module: fx.GraphModule, budget: float | str, owner: int) -> None:
        self.module, self.budget, self.owner = module, budget, owner
        self._by_shape: dict[tuple[Any, ...], Callable[..., Any]] = {}
        self._has_said = False

    def __call__(self, *inputs: Any) -> Any:
        shape = (*(each for each in inputs if isinstance(each, int)), torch.is_grad_enabled())
        if shape not in self._by_shape:
            self._by_shape[shape] = self.traced(inputs)
        return self._by_shape[shape](*inputs)

    def traced(self, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Plan the graph for inputs of these shapes, and return the planned function."""
        programs: list[tuple[Program, frozenset[str], int]] = []

        def partition(joint_module: fx.GraphModule, _: Any, *, num_fwd_outputs: int, **__: Any) -> tuple[Any, Any]:
            if self._is_in_flight():
                raise PlanError(
                    "Another graph of the model holds values for its backward pass, and a budget is for one graph",
                    hint="torch.compile(..., fullgraph=True) names what breaks the graph. lowtide.plan has an engine "
                    "that needs no graph.",
                )
            joint = Joint(joint_module, num_fwd_outputs)
            with without_modes():
                program = _program(joint, self.budget, says=not self._has_said)
            self._has_said = True
            programs.append((program, frozenset(node.name for node in joint.primals), num_fwd_outputs))
            return graphs_of(joint, program)

        def forward(graph: fx.GraphModule, _: Any) -> Any:
            return self._noting(boxed(graph), *programs[-1]) if programs else boxed(graph)

        compilers = {"fw_compiler": forward, "bw_compiler": lambda graph, _: boxed(graph)}
        with replaced_kernels(SUBSTITUTES, FIXES), plain_composites:
            return aot_autograd(**compilers, partition_fn=partition)(self.module, inputs)

    def _is_in_flight(self) -> bool:
        alive = [each for each in _in_flight.pop(self.owner, ()) if each() is not None]
        if alive:
            _in_flight[self.owner] = alive
        return bool(alive)

    def _noting(
        self, run: Callable[[list[Any]], Any], program: Program, primals: frozenset[str], outputs: int
    ) -> Callable[[list[Any]], Any]:
        """Note after each forward pass what waits for its backward pass, and warn where that is another one's too."""
        own = [outputs + place for place, cell in enumerate(program.kept) if cell.op not in primals]
        warned: list[bool] = []

        def forward(inputs: list[Any]) -> Any:
            if self._is_in_flight() and not warned:
                warned.append(True)
                warnings.warn(
                    "A compiled model runs forward before the backward pass of an earlier call: its budget is for one",
                    RuntimeWarning,
                    stacklevel=2,
                )
            given = {id(storage) for storage in _storages(inputs)}
            results = run(inputs)
            given |= {id(storage) for storage in _storages(results[:outputs])}
            for_backward = [each for each in _storages(results[place] for place in own) if id(each) not in given]
            _in_flight.setdefault(self.owner, []).extend(map(weakref.ref, for_backward))
            return results

        mark_boxed(forward)
        return forward


def _program(joint: Joint, budget: float | str, *, says: bool) -> Program:
    """The fastest program of a graph within a budget, by modelled seconds. ``says`` logs what the budget covers."""
    values = [node.meta.get("val") for node in joint.primals]
    device = next((value.device for value in values if isinstance(value, Tensor)), torch.device("cpu"))
    name = "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)
    seconds, workspace = node_seconds(joint, name), node_workspaces(joint, name)
    always = sum({id(s): _rounded(s.nbytes(), device) for s in _storages(values)}.values())
    programs = [each.program for each in solutions(Problem(joint, seconds, workspace))]  # the fastest first
    peaks = [always + _peak(program, joint, workspace, device) for program in programs]
    wanted = resolve_budget(budget, max(peaks), device.type).bytes
    best = next((place for place, peak in enumerate(peaks) if peak <= wanted), None)
    if best is None:
        raise BudgetError(
            f"{format_size(wanted)} is below the smallest program of this graph ({format_size(min(peaks))}, "
            f"{min(peaks)} bytes): parameters and inputs are {format_size(always)}",
            smallest_bytes=min(peaks),
        )
    program = programs[best]
    if says:
        _log.warning(
            "lowtide: a graph of %d ops is planned with %s of %s, for parameters, inputs, gradients and values of the "
            "graph. It recomputes %d ops. The loss around it and the optimizer are not seen, and come on top",
            len(joint.forward),
            format_size(peaks[best]),
            format_size(wanted),
            program.recomputed,
        )
    return program


def _peak(program: Program, joint: Joint, workspace: Callable[[fx.Node], int], device: torch.device) -> int:
    """Most bytes of a program, with what kernels allocate inside themselves."""

    def cost(each: Instruction) -> Cost:
        runs = each.kind in (Kind.COMPUTE, Kind.RECOMPUTE) and not each.value.is_state
        return Cost(0.0, workspace(joint.nodes[each.value.op]) if runs else 0)

    sizes = {value: _rounded(size, device) for value, size in program.bytes.items()}
    return max(simulate(replace(program, bytes=sizes), cost).during_bytes, default=0)


def _rounded(size: int, device: torch.device) -> int:
    unit = 1 if device.type == "cpu" else CudaMeter.granularity
    return -(-size // unit) * unit


def _storages(values: Iterable[Any]) -> list[torch.UntypedStorage]:
    return [value.untyped_storage() for value in values if isinstance(value, Tensor)]
