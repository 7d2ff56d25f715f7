"""The ``graph`` engine: a program that runs behind autograd.

The loss is captured by Dynamo and AOTAutograd. Its forward pass runs at once; its backward pass is cut into pieces,
each a node of autograd that hands on the gradients it completes. So parameters' hooks, ``zero_grad``, accumulation,
autocast, clipping, optimizers, also those that step in backward, are as before. Ops are those of the plain step, so
are the bits.
"""

from __future__ import annotations

import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from lowtide.batches import tensors
from lowtide.compat.dispatch import active_modes, without_autocast
from lowtide.compat.dynamo import aot_autograd, traced_metadata
from lowtide.compat.tensors import is_view, version_of
from lowtide.engines.lowering.ops import Piece, boxed, forward_graph, graphs_of, pieces_of
from lowtide.engines.watch import unwatched
from lowtide.errors import LowtideError
from lowtide.planning.programs.program import Program, Value
from lowtide.tracing.capture.joint import Joint
from lowtide.tracing.capture.loss import Capture, CapturedGraph, CompiledLoss, call_key
from lowtide.tracing.step_state import parameters_of, watch_modules
from lowtide.workload import Workload

_aten: Any = torch.ops.aten
_MOST_SHAPES = 16  # captured at a time: each holds its code, and some MiB on the host
Planner = Callable[[Joint], Program]


class PlannedLoss:
    """The loss of a step, run by programs: one for each structure and shape of the batch.

    ``planner_for(batch)`` makes the program of a joint graph, for batches of that shape. ``uncaptured(batch)`` gives
    what runs such batches without a program, where that is wanted.
    """

    is_compiled = True

    def __init__(
        self,
        work: Workload,
        planner_for: Callable[[Any], Planner],
        uncaptured: Callable[[Any], Callable[[Any], Tensor] | None] = lambda _: None,
    ) -> None:
        self.__wrapped__ = work.loss
        self.work = work
        self.planner_for = planner_for
        self.uncaptured = uncaptured
        self._captured: OrderedDict[Any, tuple[Planner, CompiledLoss | _Taken]] = OrderedDict()  # last used at the end
        self._watched = False  # whether a dispatch mode was warned about
        self._failed: set[Any] = set()  # where capture failed once
        self._given_up: set[Any] = set()  # where the plain loss runs
        if work.captures:  # which are shared only now
            self._capture(call_key(work.batch), planner_for(work.batch))

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        """The loss of the step's own model; ``model`` is there since this takes the place of a loss function."""
        if any(not mode.is_infra_mode() for mode in active_modes()):
            if not self._watched:
                self._watched = True
                warnings.warn(
                    "A dispatch mode looks at the ops of this step, which then runs as it is: the budget is not kept",
                    RuntimeWarning,
                    stacklevel=3,
                )
            return self.work.compute_loss(batch=batch)
        key = call_key(batch)
        if key in self._given_up:
            return self.work.compute_loss(batch=batch)
        if key not in self._captured:
            run = self.uncaptured(batch)
            if run is not None:
                return run(batch)
            self._capture(key, self.planner_for(batch))
        self._captured.move_to_end(key)
        try:
            with unwatched(self.work.model):
                return self._captured[key][1](batch)
        except Exception as error:
            if type(error).__name__ == "FailOnRecompileLimitHit":
                return self._give_up(
                    key,
                    batch,
                    "The loss has been captured for as many values as Dynamo allows",
                    "Make a tensor of what changes at each step, such as a number in the model or in the batch",
                )
            inner = getattr(error, "inner_exception", None)  # of Dynamo's error
            if isinstance(inner, (LowtideError, Warning)):  # what the planner says
                raise inner from None
            if type(error).__name__ not in ("Unsupported", "UserError", "TorchRuntimeError"):  # Dynamo's too
                raise
            inputs = (*parameters_of(self.work), *tensors(batch))
            if not any(each.requires_grad for each in inputs):
                return self.work.compute_loss(batch=batch)  # which says that nothing is trained
            what = next(iter(str(error).splitlines()), "")
            return self._give_up(
                key, batch, f"The loss is no longer captured as one graph ({what})", "Plan with engine='eager'"
            )

    def __reduce_ex__(self, protocol: object) -> Any:
        """Refuse to be copied or pickled: captured code stays that of this model."""
        raise LowtideError(
            "The loss of a planned step is neither copied nor pickled: it is bound to its model",
            hint="Copy the model (copy.deepcopy(step.model)), then apply the plan to a Workload of the copy.",
        )

    def _capture(self, key: Any, planner: Planner) -> None:
        """Have a shape captured when it is next called, and free the one that was not used for longest."""
        if len(self._captured) >= _MOST_SHAPES:
            _, (_, oldest) = self._captured.popitem(last=False)
            oldest.release()
        taken = next((capture for capture in self.work.captures or () if capture.take(key)), None)
        loss = CompiledLoss(self.work, _Backend(planner)) if taken is None else _Taken(taken, planner)
        self._captured[key] = planner, loss

    def release(self) -> None:
        """Free all programs and captured graphs."""
        while self._captured:
            self._captured.popitem()[1][1].release()

    def _give_up(self, key: Any, batch: Any, why: str, hint: str) -> Tensor:
        """The plain loss, from now on for such batches. Where that fails too, its error says why, and that is all.

        After a first step, in which the model made what it keeps, the loss is captured once more.
        """
        kept_since = watch_modules(self.work)
        loss = self.work.compute_loss(batch=batch)
        warnings.warn(f"{why}, and runs as it is: the budget is not kept. {hint}", RuntimeWarning, stacklevel=5)
        if not kept_since() or key in self._failed:
            self._given_up.add(key)
            self._captured.pop(key)[1].release()
        self._failed.add(key)
        return loss


def planned_loss(work: Workload, planner: Planner) -> Callable[[Any], Tensor]:
    """The step's loss as a function of the batch, run by the program that ``planner`` makes of its joint graph."""
    loss = PlannedLoss(work, lambda _: planner)
    return lambda batch: loss(work.model, batch)


class _Taken:
    """The loss as it was captured while planning, run by a program."""

    def __init__(self, capture: Capture, planner: Planner) -> None:
        self.capture = capture
        try:
            joint = capture.graph.joint
            capture.run_by(_Runner(joint, planner(joint), capture.graph.moved), _Backend(planner))
        except BaseException:
            capture.give_back()
            raise

    def __call__(self, batch: Any) -> Tensor:
        return self.capture.loss(batch)

    def release(self) -> None:
        self.capture.give_back()


class _Backend:
    """For Dynamo: a graph of the forward pass in, what runs it by a program out.

    Dynamo holds backends until they are released; so this one does not hold the planner, which may hold the model.
    """

    def __init__(self, planner: Planner) -> None:
        self.planner = weakref.ref(planner)

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        found: list[tuple[Joint, Program]] = []
        written: list[Any] = []

        def partition(joint_module: fx.GraphModule, _: Any, *, num_fwd_outputs: int, **__: Any) -> tuple[Any, Any]:
            joint = Joint(joint_module, num_fwd_outputs)
            planner = self.planner()
            assert planner is not None
            found.append((joint, planner(joint)))
            return graphs_of(*found[-1])

        def compiler(graph: fx.GraphModule, _: Any) -> Callable[[list[Any]], Any]:
            written.append(traced_metadata())
            return boxed(graph)

        whole = aot_autograd(fw_compiler=compiler, bw_compiler=compiler, partition_fn=partition)(module, inputs)
        graph = CapturedGraph(found[0][0], inputs, written[0]) if found else None
        if graph is None or not graph.is_plain:
            return whole  # no gradients are wanted; or the inputs are not plain tensors, which AOTAutograd can handle
        return _Runner(*found[0], graph.moved)


class _Runner:
    """Runs the forward pass, and links the pieces of the backward pass into autograd's graph."""

    def __init__(self, joint: Joint, program: Program, mutated: Sequence[int]) -> None:
        self.mutated = len(mutated)
        values = zip(mutated, joint.outputs, strict=False)  # a batch norm's statistics are moved in their place
        self.moved = [(i, place) for i, (place, value) in enumerate(values) if value is not joint.primals[place]]
        primals = {Value(node.name) for node in joint.primals}
        self.kept = tuple(cell for cell in program.kept if cell not in primals)
        shown = set(program.held(Value(joint.loss.name)))
        self.shown = tuple(cell for cell in self.kept if shown.intersection(program.held(cell)))  # they are the loss
        self.forward = boxed(forward_graph(joint, program, self.kept), keeps_graph=False)
        self.pieces = pieces_of(joint, program)

    def __call__(self, *inputs: Any) -> tuple[Tensor]:
        with torch.no_grad(), without_autocast():  # the graph has its casts
            *results, loss = self._run_forward(list(inputs))
            self._move(inputs, results)
        cells = dict(zip(self.kept, results[self.mutated :], strict=True))
        cells.update({cell: cells[cell].detach() for cell in self.shown})  # the loss itself will hold the run
        run = _Run(loss, cells, {cell: version_of(cells[cell]) for cell in self.shown})
        before: Any = None
        for piece in reversed(self.pieces):
            read = [inputs[place] for place in (*piece.inputs_read, *piece.inputs_seen)]
            before = _Node.apply(run, piece, read, before, *(inputs[place] for place in piece.inputs))
        return (before,)

    def _move(self, inputs: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Give buffers their new values, those of one dtype at once."""
        groups: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        for index, place in self.moved:
            into, given = groups.setdefault(values[index].dtype, ([], []))
            into.append(inputs[place])
            given.append(values[index])
        for into, given in groups.values():
            _aten._foreach_copy_(into, given)

    def _run_forward(self, inputs: list[Any]) -> list[Tensor]:
        """New values of buffers, what is kept, and the loss."""
        results = list(self.forward(inputs))
        loss = results.pop(self.mutated)
        return [*results, loss.clone() if is_view(loss) else loss]


@dataclass
class _Run:
    """What one forward pass keeps: a piece takes what it is the last to read, and leaves what later ones will."""

    loss: Tensor | None
    cells: dict[Value, Any]
    versions: dict[Value, int]  # of those that the caller can write to
    done: set[int] = field(default_factory=set)

    def take_loss(self) -> Tensor:
        loss, self.loss = self.loss, None
        assert loss is not None
        return loss

    def check_versions(self, piece: Piece) -> None:
        """Raise autograd's error if the loss was written to, and a piece reads it."""
        for cell, _ in piece.cells:
            expected = self.versions.get(cell)
            if expected is not None and (found := version_of(self.cells[cell])) != expected:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"the planned loss is at version {found}; expected version {expected} instead"
                )


class _Node(torch.autograd.Function):
    """A node that runs one piece. The first gives the loss; what the others give only links each to the one before."""

    @staticmethod
    def forward(ctx: Any, run: _Run, piece: Piece, read: list[Tensor], after: Tensor | None, *inputs: Tensor) -> Tensor:
        ctx.run, ctx.piece, ctx.is_last = run, piece, after is None
        ctx.save_for_backward(*read)  # autograd then says if one was written to since
        assert run.loss is not None
        return run.take_loss() if piece.index == 0 else run.loss.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        run, piece = ctx.run, ctx.piece
        if torch.is_grad_enabled():
            raise LowtideError(
                "Gradients of gradients do not go through a planned step",
                hint="Leave out create_graph=True, or undo the plan: step.undo().",
            )
        if piece.index in run.done:
            raise LowtideError(
                "A planned step's backward pass runs once: what it kept is gone",
                hint="Compute the loss again, or undo the plan: step.undo().",
            )
        if run.versions:
            run.check_versions(piece)
        run.done.add(piece.index)
        values = [run.cells.pop(cell) if is_last else run.cells[cell] for cell, is_last in piece.cells]
        values += ctx.saved_tensors[: len(piece.inputs_read)]
        if piece.index == 0:
            values += gradients
        with without_autocast():
            *complete, made = piece.run(values)
        run.cells.update(zip(piece.made, made, strict=True))
        return None, None, None, None if ctx.is_last else gradients[0].new_empty(0), *complete
