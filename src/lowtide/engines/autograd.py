"""A lowered program behind autograd: the forward pass runs at once, the backward pass is a chain of nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lowtide.compat.dispatch import without_autocast
from lowtide.compat.tensors import is_view, version_of
from lowtide.errors import LowtideError
from lowtide.planning.lowering import Lowered, Piece
from lowtide.planning.programs.program import Program, Value
from lowtide.tracing.capture.joint import Joint

_aten: Any = torch.ops.aten


class Runner:
    """Runs the forward pass, and links the pieces of the backward pass into autograd's graph."""

    def __init__(self, joint: Joint, program: Program, lowered: Lowered, mutated: Sequence[int]) -> None:
        self.mutated = len(mutated)
        values = zip(mutated, joint.outputs, strict=False)  # a batch norm's statistics are moved in their place
        self.moved = [(i, place) for i, (place, value) in enumerate(values) if value is not joint.primals[place]]
        counters = {node for node, _ in joint.counters}
        counted = [place for place, node in enumerate(joint.primals) if node in counters]
        self.written = sorted({*counted, *(place for _, place in self.moved)})  # inputs that forward writes to
        self.forward, self.kept, self.pieces = lowered.forward, lowered.kept, lowered.pieces
        shown = set(program.held(Value(joint.loss.name)))
        self.shown = tuple(cell for cell in self.kept if shown.intersection(program.held(cell)))  # they are the loss

    def __call__(self, *inputs: Any) -> tuple[Tensor]:
        with torch.no_grad(), without_autocast():  # the graph has its casts
            loss, cells = self.run_forward(list(inputs))
        cells.update({cell: cells[cell].detach() for cell in self.shown})  # the loss itself will hold the run
        run = _Run(loss, cells, {cell: version_of(cells[cell]) for cell in self.shown}, self)
        before: Any = None
        for piece in reversed(self.pieces):
            read = [inputs[place] for place in (*piece.inputs_read, *piece.inputs_seen)]
            before = _Node.apply(run, piece, read, before, *(inputs[place] for place in piece.inputs))
        return (before,)

    def finished(self) -> None:
        """Called at the end of each backward pass."""

    def _move(self, inputs: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Give buffers their new values, those of one dtype at once."""
        groups: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        for index, place in self.moved:
            into, new = groups.setdefault(values[index].dtype, ([], []))
            into.append(inputs[place])
            new.append(values[index])
        for into, new in groups.values():
            _aten._foreach_copy_(into, new)

    def run_forward(self, inputs: list[Any]) -> tuple[Tensor, dict[Value, Any]]:
        """Run the forward pass: the loss, and the values that backward reads. Buffers get their new values."""
        results = list(self.forward(list(inputs)))
        loss = results.pop(self.mutated)
        self._move(inputs, results)
        return loss.clone() if is_view(loss) else loss, dict(zip(self.kept, results[self.mutated :], strict=True))

    def run_backward(
        self, inputs: Sequence[Any], cells: dict[Value, Any], tangent: Tensor
    ) -> Iterator[tuple[int, Tensor | None]]:
        """Run the whole backward pass: the place of each input that has a gradient, and its gradient."""
        for piece in self.pieces:
            given = [] if piece.index else [tangent]
            complete = run_piece(piece, cells, [inputs[place] for place in piece.inputs_read], given)
            yield from zip(piece.inputs, complete, strict=True)


@dataclass
class _Run:
    """Values that one forward pass keeps. A piece takes those that it is the last to read, and adds its own results."""

    loss: Tensor | None
    cells: dict[Value, Any]
    versions: dict[Value, int]  # of those that the caller can write to
    runner: Runner
    done: set[int] = field(default_factory=set)

    def take_loss(self) -> Tensor:
        loss, self.loss = self.loss, None
        assert loss is not None
        return loss

    def check_versions(self, piece: Piece) -> None:
        """Raise autograd's error if the loss was written to, and a piece reads it."""
        for cell, _ in piece.cells:
            expected = self.versions.get(cell)
            if expected is not None and (version := version_of(self.cells[cell])) != expected:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation. "
                    f"The planned loss is at version {version}; expected version {expected} instead"
                )


class _Node(torch.autograd.Function):
    """A node that runs one piece. The first returns the loss; the others return empty tensors, which link them."""

    @staticmethod
    def forward(ctx: Any, run: _Run, piece: Piece, read: list[Tensor], after: Tensor | None, *inputs: Tensor) -> Tensor:
        ctx.run, ctx.piece, ctx.is_last = run, piece, after is None
        ctx.save_for_backward(*read)  # autograd then says if one was written to since
        assert run.loss is not None
        return run.take_loss() if piece.index == 0 else run.loss.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        run, piece = ctx.run, ctx.piece
        check_backward(piece.index in run.done)
        if run.versions:
            run.check_versions(piece)
        run.done.add(piece.index)
        read = ctx.saved_tensors[: len(piece.inputs_read)]
        with without_autocast():
            complete = run_piece(piece, run.cells, read, () if piece.index else gradients)
        if len(run.done) == len(run.runner.pieces):
            run.runner.finished()
        return None, None, None, None if ctx.is_last else gradients[0].new_empty(0), *complete


def run_piece(piece: Piece, cells: dict[Value, Any], read: Sequence[Any], tangents: Sequence[Tensor]) -> list[Any]:
    """Run a piece of the backward pass: gradients that it completes. Cells lose what it is the last to read."""
    values = [cells.pop(cell) if is_last else cells[cell] for cell, is_last in piece.cells]
    values += read
    values += tangents
    *complete, results = piece.run(values)
    cells.update(zip(piece.results, results, strict=True))
    return complete


def check_backward(is_done: bool) -> None:
    """Raise an error where a planned step's backward pass cannot run: as part of a graph, or twice."""
    if torch.is_grad_enabled():
        raise LowtideError(
            "Gradients of gradients do not go through a planned step",
            hint="Leave out create_graph=True, or undo the plan: step.undo().",
        )
    if is_done:
        raise LowtideError(
            "A planned step's backward pass runs once: its saved values are freed",
            hint="Compute the loss again, or undo the plan: step.undo().",
        )
