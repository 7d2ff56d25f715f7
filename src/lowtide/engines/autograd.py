"""A lowered program behind autograd: the forward pass runs at once, the backward pass is a chain of nodes."""

from __future__ import annotations

from collections.abc import Sequence
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
        self.forward, self.kept, self.pieces = lowered.forward, lowered.kept, lowered.pieces
        shown = set(program.held(Value(joint.loss.name)))
        self.shown = tuple(cell for cell in self.kept if shown.intersection(program.held(cell)))  # they are the loss

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
            into, new = groups.setdefault(values[index].dtype, ([], []))
            into.append(inputs[place])
            new.append(values[index])
        for into, new in groups.values():
            _aten._foreach_copy_(into, new)

    def _run_forward(self, inputs: list[Any]) -> list[Tensor]:
        """New values of buffers, kept values, and the loss."""
        results = list(self.forward(inputs))
        loss = results.pop(self.mutated)
        return [*results, loss.clone() if is_view(loss) else loss]


@dataclass
class _Run:
    """Values that one forward pass keeps. A piece takes those that it is the last to read, and adds its own results."""

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
        if torch.is_grad_enabled():
            raise LowtideError(
                "Gradients of gradients do not go through a planned step",
                hint="Leave out create_graph=True, or undo the plan: step.undo().",
            )
        if piece.index in run.done:
            raise LowtideError(
                "A planned step's backward pass runs once: its saved values are freed",
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
            *complete, results = piece.run(values)
        run.cells.update(zip(piece.results, results, strict=True))
        return None, None, None, None if ctx.is_last else gradients[0].new_empty(0), *complete
