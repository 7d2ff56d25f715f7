"""Schedules as nested checkpoints, the form that modules run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from lowtide.chains.schedule import Action, Operation, Schedule
from lowtide.errors import PlanError

Tree: TypeAlias = "tuple[int | Tree, ...]"
"""Segments that are recomputed together. ``(0, (1, 2), ((3,), 4, 5))`` keeps all of 0, and has two segments: 1 to 2 and
3 to 5. When the second one is recomputed, it keeps all of 4 and 5, and 3 is a segment inside it."""


def nested(schedule: Schedule) -> Tree:
    """The tree of segments whose recomputation runs a schedule, operation by operation.

    Every persistent schedule has a tree: stages that are passed over and recomputed are a segment. Schedules from
    ``unroll`` are persistent. Other schedules raise ``PlanError``.

    >>> nested(Schedule.parse("F1c, F2n, F3e, F4e, B4, B3, F1c, F2e, B2, F1e, B1"))
    (((0,), 1), 2, 3)
    """
    reader = _OperationReader(schedule.operations)
    tree = reader.nodes(0, len(schedule.runs) - 1)
    if reader.place != len(schedule.operations):
        raise reader.wrong()
    return tree


class _OperationReader:
    """Reads operations from the first to the last."""

    def __init__(self, operations: Sequence[Operation]) -> None:
        self.operations = operations
        self.place = 0

    def nodes(self, first: int, last: int) -> Tree:
        """The tree of stages ``first`` to ``last``, up to the backward of the first."""
        segments: list[tuple[int, int]] = []  # the first stage and one past the last; the first twice if kept
        stage = first
        while stage <= last:
            end = stage + 1
            is_kept = self.reads(Action.EVERYTHING, stage)
            if not is_kept:
                self.expect(Action.CHECKPOINT, stage)
                while end <= last and self.reads(Action.NOTHING, end):
                    end += 1
            segments.append((stage, stage if is_kept else end))
            stage = end
        tree: list[int | Tree] = []
        for stage, end in reversed(segments):
            if stage == end:
                self.expect(Action.BACKWARD, stage)
                tree.append(stage)
            else:
                tree.append(self.nodes(stage, end - 1))
        return tuple(reversed(tree))

    def reads(self, kind: Action, stage: int) -> bool:
        """Read the next operation if it is this one; say whether it is."""
        matches = self.operations[self.place : self.place + 1] == (Operation(kind, stage),)
        self.place += matches
        return matches

    def expect(self, kind: Action, stage: int) -> None:
        if not self.reads(kind, stage):
            raise self.wrong(f", where nested checkpoints have {Operation(kind, stage)}")

    def wrong(self, why: str = "") -> PlanError:
        """About the next operation."""
        ends = self.place >= len(self.operations)
        what = "The end" if ends else f"{self.operations[self.place]}, operation {self.place + 1}"
        return PlanError(f"{what} of the schedule does not nest{why}")
