"""A schedule as nested checkpoints, which is how modules run it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from lowtide.chains.schedule import Action, Operation, Schedule
from lowtide.errors import PlanError

Tree: TypeAlias = "tuple[int | Tree, ...]"
"""What is recomputed together: ``(0, (1, 2), ((3,), 4, 5))`` keeps all of 0, has 1 and 2 in one segment, and 3 to 5 in
another. When that one runs again in backward, it keeps all of 4 and 5, and 3 is a segment inside it."""


def nested(schedule: Schedule) -> Tree:
    """The tree of segments whose recomputation runs a schedule, operation by operation.

    Passing over stages, to come back to them, is a checkpoint around them; how they then run is what is inside it. So
    every persistent schedule has a tree, and what ``unroll`` makes is persistent. Others raise ``PlanError``.

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
        """How stages ``first`` to ``last`` run, up to the backward of the first."""
        found: list[tuple[int, int]] = []  # stages that go on together, the first and one past the last
        stage = first
        while stage <= last:
            end = stage + 1
            kept = self.reads(Action.EVERYTHING, stage)
            if not kept:
                self.expect(Action.CHECKPOINT, stage)
                while end <= last and self.reads(Action.NOTHING, end):
                    end += 1
            found.append((stage, stage if kept else end))
            stage = end
        tree: list[int | Tree] = []
        for stage, end in reversed(found):
            if stage == end:
                self.expect(Action.BACKWARD, stage)
                tree.append(stage)
            else:
                tree.append(self.nodes(stage, end - 1))
        return tuple(reversed(tree))

    def reads(self, kind: Action, stage: int) -> bool:
        """Whether this is the next operation, which is then read."""
        there = self.operations[self.place : self.place + 1] == (Operation(kind, stage),)
        self.place += there
        return there

    def expect(self, kind: Action, stage: int) -> None:
        if not self.reads(kind, stage):
            raise self.wrong(f", where nested checkpoints have {Operation(kind, stage)}")

    def wrong(self, why: str = "") -> PlanError:
        """About the next operation."""
        ends = self.place >= len(self.operations)
        what = "The end" if ends else f"{self.operations[self.place]}, operation {self.place + 1}"
        return PlanError(f"{what} of the schedule does not nest{why}")
