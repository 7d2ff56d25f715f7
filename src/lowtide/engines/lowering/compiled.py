"""The ``compiled`` lowering: regions of a program, each distinct one compiled once by Inductor."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

from torch import Tensor, fx

from lowtide.compat.inductor import compile_graph, compiled_together, decompose
from lowtide.compat.operators import foreach_add_
from lowtide.engines.lowering.graph_code import GraphWriter, boxed, value_name
from lowtide.engines.lowering.ops import OpsLowering
from lowtide.engines.lowering.pieces import Ports, cut
from lowtide.engines.lowering.regions import DECOMPOSITIONS, Region, regions_of
from lowtide.planning.lowering import Lowered
from lowtide.planning.programs.fused import fused_seconds, is_free
from lowtide.planning.programs.program import Kind, Program, Role, Value
from lowtide.planning.programs.program_profile import Forecast
from lowtide.planning.solvers.solver import Problem, Solution
from lowtide.techniques.rewrites import CHANNELS_LAST, REWRITES, SEEDED_DROPOUT, rewritten
from lowtide.techniques.technique import Fidelity, Price
from lowtide.tracing.capture.joint import Joint

Code = Callable[[list[Any]], Sequence[Any]]


class CompiledLowering:
    """Runs regions of compiled code: the same mathematics with other rounding."""

    name = "compiled"
    note = "Regions are compiled by Inductor: they round otherwise, and draw dropout masks of their own."
    compiles = True
    reference = "seeded"

    def is_offered(self, joint: Joint) -> bool:
        """For every graph."""
        return True

    def can_run(self, joint: Joint, program: Program) -> bool:
        """Programs without copies to the host and without codes."""
        ops = (Kind.COMPUTE, Kind.RECOMPUTE, Kind.FREE, Kind.RETURN_GRAD)
        return all(each.kind in ops for each in (*program.forward, *program.backward))

    def problem(self, form: Joint, forecast: Forecast) -> Problem:
        """Each op as it runs in compiled code."""
        seconds = fused_seconds(form, forecast.seconds)
        return Problem(form, seconds, forecast.workspace, is_free=partial(is_free, form), prefers_blocks=True)

    def price(self, problem: Problem, solution: Solution, fidelity: Fidelity) -> Price:
        """Price other rounding than the plain step's, and fewer seconds for elementwise ops."""
        return Price(
            max(fidelity, Fidelity.ROUNDOFF),
            compute_seconds=solution.seconds - problem.saved_seconds,
            source="modelled",
        )

    def form(self, joint: Joint) -> Joint:
        """The graph as captured, with rewrites, convolutions channels-last, and dropout masks from seeds."""
        if self.name not in joint.forms:
            joint.forms[self.name] = rewritten(joint, (SEEDED_DROPOUT, CHANNELS_LAST, *REWRITES))
        return joint.forms[self.name]

    def lower(self, joint: Joint, program: Program) -> Lowered:
        """Compiled code for forward, and for each piece of backward."""
        compiler = _ProgramCompiler(joint, program)
        with compiled_together():
            lowered = compiler.lowered()
        joint.compiled.update(compiler.compiled)
        return lowered


class SeededLowering(CompiledLowering):
    """Runs programs of compiled graphs op by op. The same seeds give the same masks, so ``verify`` compares with it."""

    name = "seeded"
    reference = ""

    def is_offered(self, joint: Joint) -> bool:
        """Never: ``verify`` compares compiled plans with it."""
        return False

    def form(self, joint: Joint) -> Joint:
        """The graph of the compiled lowering."""
        return CompiledLowering().form(joint)

    def lower(self, joint: Joint, program: Program) -> Lowered:
        """Generated Python, one op after another."""
        return OpsLowering().lower(joint, program)


@dataclass(frozen=True)
class _RegionCall:
    """One region in a pass: its code, and the places of its arguments and results among the pass's values."""

    code: Code
    reads: tuple[int, ...]
    freed: tuple[int, ...]  # places of values that no later region reads
    results: tuple[int, ...]


def _run(calls: Sequence[_RegionCall], values: list[Any]) -> None:
    """Run regions in order. A region's code frees its own arguments: no name here holds them, nor a result."""
    for call in calls:
        arguments = [values[place] for place in call.reads]
        for place in call.freed:
            values[place] = None
        results = list(call.code(arguments))
        for place in reversed(call.results):
            values[place] = results.pop()


class _ProgramCompiler:
    def __init__(self, joint: Joint, program: Program) -> None:
        self.joint, self.program = joint, program
        instructions = [*program.forward, *program.backward]
        self.makers = {each.value: each for each in instructions if each.kind in (Kind.COMPUTE, Kind.RECOMPUTE)}
        self.primals = {Value(node.name): place for place, node in enumerate(joint.primals)}
        self.tangents = [Value(node.name) for node in joint.tangents]
        self.compiled: dict[str, Code] = {}  # by digest: code of this program that no other one had

    def lowered(self) -> Lowered:
        backward = regions_of(self.joint, self.program.backward, self.makers)
        read = dict.fromkeys(value for region in backward for value in region.reads)
        computed = {value for region in backward for value in region.results}
        saved = tuple(v for v in read if v not in computed and v not in self.primals and v not in self.tangents)
        return Lowered(self._forward(saved), saved, cut(self.joint, backward, _ports, self._piece))

    def _forward(self, saved: tuple[Value, ...]) -> Code:
        outputs = [Value(node.name) if isinstance(node, fx.Node) else node for node in self.joint.outputs]
        returned = [value for value in outputs if isinstance(value, Value)]
        regions = regions_of(self.joint, self.program.forward, self.makers, read_later=saved, returned=returned)
        places, calls = self._calls(regions, list(self.primals), held={*returned, *saved})
        size = len(places)
        results = [places[value] if isinstance(value, Value) else None for value in (*outputs, *saved)]
        counters: dict[int, list[int]] = {}  # by how much they count on
        for node, amount in self.joint.counters:
            counters.setdefault(amount, []).append(places[Value(node.name)])

        def forward(inputs: list[Any]) -> list[Any]:
            values: list[Any] = [*inputs, *[None] * (size - len(inputs))]
            inputs.clear()
            _run(calls, values)
            for amount, counting in counters.items():
                foreach_add_([values[place] for place in counting], amount)
            return [None if place is None else values[place] for place in results]

        return forward

    def _piece(self, regions: Sequence[Region], taken: Sequence[Value], left: Sequence[Value]) -> Code:
        """Code of a piece of the backward pass."""
        returned = [each.reads[0] for region in regions for each in region.returned]
        places, calls = self._calls(regions, taken, {*left, *returned})
        return partial(_run_piece, calls, len(places), [places[v] for v in returned], [places[v] for v in left])

    def _calls(
        self, regions: Sequence[Region], given: Sequence[Value], held: set[Value]
    ) -> tuple[dict[Value, int], list[_RegionCall]]:
        """Calls of consecutive regions, and the place of each value that passes between them."""
        places = {value: place for place, value in enumerate(given)}
        for value in chain.from_iterable(region.results for region in regions):
            places.setdefault(value, len(places))
        last = {value: index for index, region in enumerate(regions) for value in region.reads}
        calls: list[_RegionCall] = []
        for index, region in enumerate(regions):
            freed = [value for value in region.reads if last[value] == index and value not in held]
            calls.append(
                _RegionCall(
                    self._code(region),
                    tuple(places[value] for value in region.reads),
                    tuple(places[value] for value in freed),
                    tuple(places[value] for value in region.results),
                )
            )
        return places, calls

    def _code(self, region: Region) -> Code:
        """Code of a region. Equal regions share it, also those of other programs over this graph."""
        writer = GraphWriter(self.joint)
        for value in region.reads:
            writer.take(value, f"given_{value_name(value)}", self.joint.nodes[value.op].meta)
        saved = {value.op for value in region.results if value.role is Role.STATE}
        for each in region.instructions:
            writer.write(replace(each, into=None), saves_state=each.value.op in saved)
        writer.graph.output(tuple(writer.now[value] for value in region.results))
        module = fx.GraphModule(self.joint.module, writer.graph)
        if not region.is_compiled:
            return boxed(module, keeps_graph=False)
        digest = _digest(module.graph)
        code = self.joint.compiled.get(digest) or self.compiled.get(digest)
        if code is None:
            inputs = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
            code = self.compiled[digest] = compile_graph(decompose(module, inputs, DECOMPOSITIONS), inputs)
        return code


def _ports(region: Region) -> Ports:
    returned = [each.reads[0] for each in region.returned]
    return Ports((*region.reads, *returned), region.results, tuple(each.value for each in region.returned))


def _run_piece(
    calls: Sequence[_RegionCall], size: int, returned: Sequence[int], results: Sequence[int], given: list[Any]
) -> list[Any]:
    values = [*given, *[None] * (size - len(given))]
    given.clear()
    _run(calls, values)
    return [*(values[place] for place in returned), [values[place] for place in results]]


def _digest(graph: fx.Graph) -> str:
    """A name of a graph's code: equal for equal ops on equal layouts, under any names of nodes."""
    names = {node: f"%{index}" for index, node in enumerate(graph.nodes)}
    lines: list[str] = []
    for node in graph.nodes:
        arguments = fx.map_arg((node.args, node.kwargs), lambda value: names[value])
        is_input = node.op == "placeholder"
        lines.append(f"{names[node]} {'' if is_input else node.target} {'' if is_input else arguments} {_layout(node)}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _layout(node: fx.Node) -> str:
    """The layout that code depends on, without the tensor's offset in its storage."""
    value = node.meta.get("val")
    return f"{value.dtype} {tuple(value.shape)} {value.stride()} {value.device}" if isinstance(value, Tensor) else ""
