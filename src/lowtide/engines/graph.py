"""The ``graph`` engine: a program as graphs of ATen ops, which run behind autograd and let go of each result early.

The loss is captured by Dynamo and AOTAutograd. Its forward pass runs at once; its backward pass is cut into pieces,
each a node of autograd that hands on the gradients it completes. So parameters' hooks, ``zero_grad``, accumulation,
autocast, clipping, optimizers, also those that step in backward, are as before. Ops are those of the plain step, so
are the bits.
"""

from __future__ import annotations

import contextlib
import operator
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.graph import _BoxedCodeGen
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from lowtide.chains import Schedule
from lowtide.errors import LowtideError, PlanError
from lowtide.planning.fastest import fastest_program
from lowtide.planning.plan import Plan, Recomputation, batch_shapes
from lowtide.planning.planned import node_seconds
from lowtide.planning.program import Cell, Instruction, Kind, Program, in_place_form, inputs_of, program_of
from lowtide.planning.recomputation import Recomputations
from lowtide.planning.stages import Stages
from lowtide.profiling import profile
from lowtide.sizes import format_size
from lowtide.tracing.joint import Joint, capture_joint, compiled_loss, is_batch_norm
from lowtide.workload import Workload

_aten: Any = torch.ops.aten
_SAME = (_aten.detach.default, _aten.alias.default)
Planner = Callable[[Joint], Program]


class PlannedLoss:
    """The loss of a step, run by programs: one for each structure and shape of the batch.

    ``planner_for(batch)`` makes the program of a joint graph, for batches of that shape.
    """

    is_compiled = True

    def __init__(self, work: Workload, planner_for: Callable[[Any], Planner]) -> None:
        self.__wrapped__ = work.loss
        self.work = work
        self.planner_for = planner_for
        self._compiled: dict[Any, Callable[[Any], Tensor]] = {}

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        """The loss of the step's own model; ``model`` is there since this takes the place of a loss function."""
        key = _shape_of(batch)
        if key not in self._compiled:
            self._compiled[key] = compiled_loss(self.work, _Backend(self.planner_for(batch)))
        try:
            with _whole_graphs():
                return self._compiled[key](batch)
        except RuntimeError as error:
            inner = getattr(error, "inner_exception", None)  # of Dynamo's error
            if isinstance(inner, (LowtideError, Warning)):  # what the planner says
                raise inner from None
            raise


def _whole_graphs() -> contextlib.AbstractContextManager[None]:
    """Inside a DDP module's forward Dynamo would cut graphs at DDP's buckets; gradients leave early without that."""
    if DistributedDataParallel._get_active_ddp_module() is None:
        return contextlib.nullcontext()
    return torch._dynamo.config.patch(optimize_ddp=False)


def planned_loss(work: Workload, planner: Planner) -> Callable[[Any], Tensor]:
    """The step's loss as a function of the batch, run by the program that ``planner`` makes of its joint graph."""
    loss = PlannedLoss(work, lambda _: planner)
    return lambda batch: loss(work.model, batch)


class Replanner:
    """A plan's own program for batches like the planned one; for others the fastest that fits the same budget."""

    def __init__(self, plan: Plan, work: Workload) -> None:
        self.plan, self.work = plan, work

    def __call__(self, batch: Any) -> Planner:
        """The planner for batches of this shape."""
        chosen = self.plan.program
        if chosen is None or batch_shapes(batch) != self.plan.fingerprint.batch:
            chosen = self._plan_again(replace(self.work, batch=batch))
        return lambda joint: self._program(joint, chosen)

    def _plan_again(self, work: Workload) -> Recomputation:
        """The fastest schedule for another batch. Its step is predicted, with each new kernel measured alone."""
        budget = self.plan.budget_bytes
        plain = profile(work, fake=True, device=self.plan.device, measure=True)
        found = Recomputations(capture_joint(work), plain)
        peaks: dict[Schedule, int] = {}
        for schedule in found.schedules:
            peaks[schedule] = found.profile(schedule).peak_bytes
            if peaks[schedule] <= budget:
                return found.chosen(schedule, peaks[schedule], budget)
        smallest = min(peaks, key=lambda schedule: peaks[schedule])
        warnings.warn(
            f"A batch of {batch_shapes(work.batch)} does not fit the budget of {format_size(budget)}, which was "
            f"planned for {self.plan.fingerprint.batch}: the smallest program takes {format_size(peaks[smallest])}",
            RuntimeWarning,
            stacklevel=2,
        )
        return found.chosen(smallest, peaks[smallest], peaks[smallest])

    def _program(self, joint: Joint, chosen: Recomputation) -> Program:
        if joint.digest != chosen.graph:  # such as of the model in evaluation mode
            return fastest_program(joint, chosen.room_bytes, seconds=node_seconds(joint, self.plan.device))
        stages, schedule = Stages(joint), Schedule.parse(chosen.schedule)
        if len(stages) != len(schedule.runs):
            raise PlanError(
                f"The plan's schedule has {len(schedule.runs)} stages, and the step's graph {len(stages)}",
                hint="Plan again.",
            )
        return program_of(stages, schedule)


class _Backend:
    """For Dynamo: a graph of the forward pass in, what runs it by a program out."""

    def __init__(self, planner: Planner) -> None:
        self.planner = planner

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        from torch._dynamo.backends.common import aot_autograd
        from torch._guards import TracingContext

        found: list[tuple[Joint, Program]] = []
        written: list[Any] = []

        def partition(joint_module: fx.GraphModule, _: Any, *, num_fwd_outputs: int, **__: Any) -> tuple[Any, Any]:
            joint = Joint(joint_module, num_fwd_outputs)
            found.append((joint, self.planner(joint)))
            return graphs_of(*found[-1])

        def boxed(graph: fx.GraphModule, _: Any) -> Callable[[list[Any]], Any]:
            written.append(TracingContext.get().fw_metadata)
            return _boxed(graph)

        whole = aot_autograd(fw_compiler=boxed, bw_compiler=boxed, partition_fn=partition)(module, inputs)
        if not found or not _is_plain(found[0][0], inputs, written[0]):
            return whole  # no gradients are wanted; or the inputs are not plain tensors, which AOTAutograd can handle
        return _Runner(*found[0], written[0].mutated_inp_runtime_indices)


def _is_plain(joint: Joint, inputs: Sequence[Any], made: Any) -> bool:
    """Whether inputs are the graph's own, one output leaves, and nothing but values of buffers changes."""
    mutated = [made.input_info[i] for i in made.mutated_inp_runtime_indices] if made is not None else []
    return (
        made is not None
        and len(joint.primals) == len(inputs)
        and len(made.output_info) == 1
        and len(joint.outputs) == len(mutated) + 1
        and not any(each.requires_grad or each.mutates_metadata for each in mutated)
    )


class _Runner:
    """Runs the forward pass, and links the pieces of the backward pass into autograd's graph."""

    def __init__(self, joint: Joint, program: Program, mutated: Sequence[int]) -> None:
        self.mutated = tuple(mutated)
        primals = {Cell(node.name) for node in joint.primals}
        self.kept = tuple(cell for cell in program.kept if cell not in primals)
        self.forward = _boxed(_forward_graph(joint, program, self.kept))
        self.pieces = _pieces(joint, program)

    def __call__(self, *inputs: Any) -> tuple[Tensor]:
        with torch.no_grad(), torch._C._DisableAutocast():  # the graph has its casts
            *results, loss = self._run_forward(list(inputs))
            self._move(inputs, results)
        run = _Run(loss, dict(zip(self.kept, results[len(self.mutated) :], strict=True)))
        before: Any = None
        for code in reversed(self.pieces):
            read = [inputs[place] for place in (*code.inputs_read, *code.inputs_seen)]
            before = _Piece.apply(run, code, read, before, *(inputs[place] for place in code.inputs))
        return (before,)

    def _move(self, inputs: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Give buffers their new values, those of one dtype at once."""
        groups: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        for place, value in zip(self.mutated, values, strict=False):
            into, given = groups.setdefault(value.dtype, ([], []))
            into.append(inputs[place])
            given.append(value)
        for into, given in groups.values():
            _aten._foreach_copy_(into, given)

    def _run_forward(self, inputs: list[Any]) -> list[Tensor]:
        """New values of buffers, what is kept, and the loss."""
        results = list(self.forward(inputs))
        loss = results.pop(len(self.mutated))
        return [*results, loss.clone() if loss._is_view() else loss]


@dataclass
class _Run:
    """What one forward pass keeps: a piece takes what it is the last to read, and leaves what later ones will."""

    loss: Tensor | None
    cells: dict[Cell, Any]
    done: set[int] = field(default_factory=set)

    def take_loss(self) -> Tensor:
        loss, self.loss = self.loss, None
        assert loss is not None
        return loss


@dataclass(frozen=True)
class _Code:
    """One piece of the backward pass."""

    index: int
    run: Callable[[list[Any]], Any]
    cells: tuple[tuple[Cell, bool], ...]  # that it reads, and whether it is the last to do so
    made: tuple[Cell, ...]  # that later pieces read
    inputs_read: tuple[int, ...]
    inputs_seen: tuple[int, ...]  # of which it reads views
    inputs: tuple[int, ...]  # whose gradients it completes


class _Piece(torch.autograd.Function):
    """A node that runs one piece. The first gives the loss; what the others give only links each to the one before."""

    @staticmethod
    def forward(ctx: Any, run: _Run, code: _Code, read: list[Tensor], after: Tensor | None, *inputs: Tensor) -> Tensor:
        ctx.run, ctx.code, ctx.is_last = run, code, after is None
        ctx.save_for_backward(*read)  # autograd then says if one was written to since
        assert run.loss is not None
        return run.take_loss() if code.index == 0 else run.loss.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        run, code = ctx.run, ctx.code
        if torch.is_grad_enabled():
            raise LowtideError(
                "Gradients of gradients do not go through a planned step",
                hint="Leave out create_graph=True, or undo the plan: step.undo().",
            )
        if code.index in run.done:
            raise LowtideError(
                "A planned step's backward pass runs once: what it kept is gone",
                hint="Compute the loss again, or undo the plan: step.undo().",
            )
        run.done.add(code.index)
        values = [run.cells.pop(cell) if is_last else run.cells[cell] for cell, is_last in code.cells]
        values += ctx.saved_tensors[: len(code.inputs_read)]
        if code.index == 0:
            values += gradients
        with torch._C._DisableAutocast():
            *complete, made = code.run(values)
        run.cells.update(zip(code.made, made, strict=True))
        return None, None, None, None if ctx.is_last else gradients[0].new_empty(0), *complete


# -- graphs of a program -------------------------------------------------------------------------------


def graphs_of(joint: Joint, program: Program) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The forward and the backward graph of a program, as AOTAutograd wants them."""
    forward = _forward_graph(joint, program, program.kept)
    backward = _Graph(joint)
    nodes = {node.name: node for node in joint.module.graph.nodes}
    for cell in program.kept:
        backward.take(cell, f"kept_{cell.op}{'_state' * cell.is_state}", nodes[cell.op].meta)
    for node in joint.tangents:
        backward.take(Cell(node.name), node.name, node.meta)
    for instruction in program.backward:
        backward.write(instruction)
    backward.graph.output(tuple(None if cell is None else backward.now[cell] for cell in program.gradients))
    return forward, fx.GraphModule(joint.module, backward.graph)


def _forward_graph(joint: Joint, program: Program, kept: Iterable[Cell]) -> fx.GraphModule:
    forward = _Graph(joint)
    for node in joint.primals:
        forward.take(Cell(node.name), node.name, node.meta)
    states = {cell.op for cell in program.kept if cell.is_state}
    for instruction in program.forward:
        forward.write(instruction, saves_state=instruction.cell.op in states)
    outputs = [forward.now[Cell(node.name)] if isinstance(node, fx.Node) else node for node in joint.outputs]
    forward.graph.output((*outputs, *(forward.now[cell] for cell in kept)))
    return fx.GraphModule(joint.module, forward.graph)


def _pieces(joint: Joint, program: Program) -> list[_Code]:
    """The backward pass, cut where it gives gradients away."""
    pieces: list[list[Instruction]] = [[]]
    for each in program.backward:
        if each.kind is not Kind.FREE and (each.kind is not Kind.GIVE or each.reads):
            if each.kind is not Kind.GIVE and pieces[-1] and pieces[-1][-1].kind is Kind.GIVE:
                pieces.append([])
            pieces[-1].append(each)
    last_read = {cell: index for index, piece in enumerate(pieces) for each in piece for cell in each.reads}
    primals = {Cell(node.name): place for place, node in enumerate(joint.primals)}
    tangents = [Cell(node.name) for node in joint.tangents]
    nodes = {node.name: node for node in joint.module.graph.nodes}
    written: list[_Code] = []
    for index, piece in enumerate(pieces):
        here = dict.fromkeys(each.cell for each in piece)
        read = dict.fromkeys(cell for each in piece for cell in each.reads if cell not in here)
        cells = [cell for cell in read if cell not in primals and cell not in tangents]
        inputs_read = [cell for cell in read if cell in primals]
        bases = dict.fromkeys(Cell(joint.storages[nodes[cell.op]].name) for cell in cells)
        made = [cell for cell in here if last_read.get(cell, -1) > index]
        graph = _Graph(joint)
        for cell in (*cells, *inputs_read, *(tangents if index == 0 else ())):
            graph.take(cell, f"given_{cell.op}_{cell.run}{'_state' * cell.is_state}", nodes[cell.op].meta)
        for each in piece:
            graph.write(each)
        given = {each.cell: graph.now[each.reads[0]] for each in piece if each.kind is Kind.GIVE}
        graph.graph.output((*given.values(), [graph.now[cell] for cell in made]))
        written.append(
            _Code(
                index,
                _boxed(fx.GraphModule(joint.module, graph.graph)),
                tuple((cell, last_read[cell] == index) for cell in cells),
                tuple(made),
                tuple(primals[cell] for cell in inputs_read),
                tuple(primals[cell] for cell in bases if cell in primals and cell not in inputs_read),
                tuple(primals[Cell(cell.op.removesuffix(".grad"))] for cell in given),
            )
        )
    return written


class _Graph:
    """Writes instructions as nodes. fx lets go of each result after its last use, which is where a program frees."""

    def __init__(self, joint: Joint) -> None:
        self.graph = fx.Graph()
        self.now: dict[Cell, fx.Node] = {}
        self._nodes = {node.name: node for node in joint.module.graph.nodes}
        self._fake = next((node.meta["val"].fake_mode for node in joint.primals if "val" in node.meta), None)

    def take(self, cell: Cell, name: str, meta: dict[str, Any]) -> None:
        self.now[cell] = self.graph.placeholder(name)
        self.now[cell].meta = {**meta, "val": self._fake_state()} if cell.is_state else dict(meta)

    def write(self, instruction: Instruction, *, saves_state: bool = False) -> None:
        cell = instruction.cell
        if instruction.kind in (Kind.FREE, Kind.GIVE) or cell.is_state:
            return
        node = self._nodes[cell.op]
        again = instruction.kind is Kind.RECOMPUTE
        read = {
            value: self.now[found]
            for value, found in zip(inputs_of(node, again=again), instruction.reads, strict=False)
        }
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda value: read.get(value))
        if node.target in _SAME:  # autograd is off here
            self.now[cell] = args[0]
            return
        if saves_state:
            both = self.graph.call_function(_run_and_save_state, (node.target, *args), kwargs)
            state = self.graph.call_function(operator.getitem, (both, 0))
            state.meta["val"] = self._fake_state()
            self.now[Cell(cell.op, is_state=True)] = state
            made = self.graph.call_function(operator.getitem, (both, 1))
        elif instruction.reads and instruction.reads[-1].is_state:
            made = self.graph.call_function(
                _run_with_state, (self.now[instruction.reads[-1]], node.target, *args), kwargs
            )
        elif again and is_batch_norm(node):
            made = self.graph.call_function(_aten._native_batch_norm_legit.no_stats, (*args[:3], *args[5:]))
        elif instruction.into is not None:
            made = self._write_over(node, args, kwargs, self.now[instruction.into])
        else:
            made = self.graph.node_copy(node, lambda value: read[value])
        made.meta = dict(node.meta)
        self.now[cell] = made

    def _write_over(self, node: fx.Node, args: Any, kwargs: Any, into: fx.Node) -> fx.Node:
        form = in_place_form(node)
        if form._overloadname == "grad_input":
            return self.graph.call_function(form, args, {**kwargs, "grad_input": into})
        first, *rest = args
        args = (first, *rest) if first is into else (into, first)  # a sum or a product of two
        return self.graph.call_function(form, args, kwargs)

    def _fake_state(self) -> Any:
        with _disable_current_modes():
            state = torch.get_rng_state()
        return self._fake.from_tensor(state) if self._fake is not None else state


def _run_and_save_state(op: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
    """The state of the generator that an op draws from, and what it gives."""
    device = _drawn_on(args, kwargs)
    state = torch.get_rng_state() if device is None else torch.cuda.get_rng_state(device)
    return state, op(*args, **kwargs)


def _run_with_state(state: Tensor, op: Any, *args: Any, **kwargs: Any) -> Any:
    """What an op gave the first time; the generator stays as it is."""
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


def _boxed(module: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """Takes its arguments in a list, which it empties: they too are let go after their last use."""
    module.graph.set_codegen(_BoxedCodeGen())
    module.recompile()

    def run(args: list[Any]) -> Any:
        return module.forward(args)

    run._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]
    return run


def _shape_of(batch: Any) -> Any:
    leaves, structure = pytree.tree_flatten(batch)
    shapes = tuple((tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    try:
        hash(shapes)
    except TypeError:
        shapes = str(shapes)
    return str(structure), shapes
