"""Schedules: the order in which a chain's stages run forward and backward; their bytes and seconds."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lowtide.chains.chain import Chain
from lowtide.errors import PlanError


class Action(StrEnum):
    """The ways in which an operation runs a stage, by the values it keeps."""

    CHECKPOINT = "c"  # forward; its input is kept
    NOTHING = "n"  # forward; its input is freed
    EVERYTHING = "e"  # forward; its input and all values that its backward reads are kept
    LIGHT = "l"  # the same without cheap results, which are recomputed when backward reads them
    BACKWARD = "b"


class Operation(NamedTuple):
    """One stage, run once. Stages count from 0 here, and from 1 in print.

    >>> str(Operation(Action.CHECKPOINT, 0)), str(Operation(Action.BACKWARD, 3))
    ('F1c', 'B4')
    """

    kind: Action
    stage: int

    def __str__(self) -> str:
        return f"B{self.stage + 1}" if self.kind is Action.BACKWARD else f"F{self.stage + 1}{self.kind}"


@dataclass(frozen=True)
class Schedule:
    """Operations in the order in which they run.

    >>> schedule = Schedule.parse("F1c, F2e, B2, F1e, B1")
    >>> print(schedule)
    F1c, F2e, B2, F1e, B1
    >>> schedule.runs
    (2, 1)
    """

    operations: tuple[Operation, ...]

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Read what ``str`` prints."""
        return cls(tuple(_operation(word.strip()) for word in text.split(",")))

    @cached_property
    def runs(self) -> tuple[int, ...]:
        """Count the forward runs of each stage."""
        count = Counter(op.stage for op in self.operations if op.kind is not Action.BACKWARD)
        return tuple(count[stage] for stage in range(max(count, default=-1) + 1))

    @cached_property
    def stopped(self) -> frozenset[int]:
        """The last stage of each recomputed segment. Its backward is next, so its tail is skipped."""
        pairs = zip(self.operations, self.operations[1:], strict=False)
        ends = {op.stage for op, after in pairs if after == (Action.BACKWARD, op.stage)}
        return frozenset(stage for stage in ends if self.runs[stage] > 1)

    def forward_seconds(self, chain: Chain) -> float:
        """Seconds of all forward runs and of recomputing cheap results."""
        runs = (count * seconds for count, seconds in zip(self.runs, chain.forward_seconds, strict=True))
        cheap = (chain.light_seconds[op.stage] for op in self.operations if op.kind is Action.LIGHT)
        return math.fsum([*runs, *cheap, *(-chain.tail_seconds[stage] for stage in self.stopped)])

    def lightly(self) -> Schedule:
        """The same schedule, with every kept stage kept lightly."""
        kinds = {Action.EVERYTHING: Action.LIGHT}
        return Schedule(tuple(op._replace(kind=kinds.get(op.kind, op.kind)) for op in self.operations))

    def __str__(self) -> str:
        return ", ".join(map(str, self.operations))


class Way(NamedTuple):
    """One way to run stages ``first`` to ``last``, backward included.

    If ``at`` is the first stage, keep it as ``kind`` says. If it is a later one, pass on to it, keeping only its input
    and that of the first, and come back. ``room`` is left to the stages from ``first + 1`` or ``at`` on.
    """

    at: int
    room: int
    kind: Action = Action.EVERYTHING


def unroll(stages: int, room: int, decide: Callable[[int, int, int], Way]) -> Schedule:
    """Build a schedule from nested decisions ``decide(first, last, room)``, from the whole chain down."""
    operations: list[Operation] = []
    todo: list[Operation | tuple[int, int, int]] = [(0, stages - 1, room)]
    while todo:
        following = todo.pop()
        if isinstance(following, Operation):
            operations.append(following)
            continue
        first, last, room = following
        at, left, kind = decide(first, last, room)
        if at == first:
            operations.append(Operation(kind, first))
            todo.append(Operation(Action.BACKWARD, first))
            if first < last:
                todo.append((first + 1, last, left))
        else:
            operations.append(Operation(Action.CHECKPOINT, first))
            operations += (Operation(Action.NOTHING, stage) for stage in range(first + 1, at))
            todo += (first, at - 1, room), (at, last, left)
    return Schedule(tuple(operations))


@dataclass(frozen=True, slots=True)
class ScheduleSimulation:
    """Bytes and seconds of a schedule, operation by operation. Value 0 counts from the start to the end."""

    during_bytes: NDArray[np.int64]  # while each operation runs, its temporaries included
    live_bytes: NDArray[np.int64]  # after each operation
    seconds: float

    @property
    def peak_bytes(self) -> int:
        """The most bytes at any time."""
        return int(self.during_bytes.max())


def simulate(chain: Chain, schedule: Schedule) -> ScheduleSimulation:
    """Run a schedule over byte sizes. Raises where an operation lacks an input or a backward is missing.

    >>> result = simulate(Chain.uniform(2, saved_bytes=3), Schedule.parse("F1c, F2e, B2, F1e, B1"))
    >>> result.peak_bytes, result.seconds, result.live_bytes.tolist()
    (7, 5.0, [2, 5, 2, 5, 2])
    """
    memory = _ChainMemory(chain)
    during: list[int] = []
    after: list[int] = []
    for place, op in enumerate(schedule.operations):
        if not 0 <= op.stage < chain.stages:
            raise _wrong(op, place, f"the chain has {chain.stages} stages")
        run = memory.backward if op.kind is Action.BACKWARD else memory.forward
        during.append(run(op, place))
        after.append(memory.live)
    if memory.gradient != 0:
        raise PlanError(f"The schedule ends before the backward of stage {memory.gradient}")
    seconds = schedule.forward_seconds(chain) + math.fsum(chain.backward_seconds)
    return ScheduleSimulation(np.array(during, np.int64), np.array(after, np.int64), seconds)


class _ChainMemory:
    """The live values, saved tensors and gradient of a chain."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self.values = {0}
        self.saved: dict[int, Action] = {}  # kept stages, and how
        self.gradient = chain.stages  # the value whose gradient is next
        self.live = chain.value_bytes[0]

    def forward(self, op: Operation, place: int) -> int:
        """Run a stage forward; return the bytes while it runs."""
        chain, stage = self.chain, op.stage
        self._need_input(op, place)
        if stage in self.saved or stage + 1 in self.values:
            raise _wrong(op, place, "its result is live already")
        if op.kind is Action.NOTHING and (stage == 0 or stage not in self.values):
            raise _wrong(op, place, "its input is not its own to free")
        if op.kind in (Action.EVERYTHING, Action.LIGHT):
            self.saved[stage] = op.kind
            self.live += self._saved_bytes(stage)
            during = self.live + chain.forward_temporary_bytes[stage]
        else:
            self.values.add(stage + 1)
            self.live += chain.value_bytes[stage + 1]
            during = self.live + chain.passing_temporary_bytes[stage]
        if op.kind is Action.NOTHING:
            self._free(stage)
        return during

    def backward(self, op: Operation, place: int) -> int:
        """Run a stage backward; return the bytes while it runs."""
        chain, stage = self.chain, op.stage
        self._need_input(op, place)
        if stage not in self.saved:
            raise _wrong(op, place, "its saved values are not kept")
        if self.gradient != stage + 1:
            raise _wrong(op, place, f"the live gradient is that of stage {self.gradient}'s output")
        if self.gradient == chain.stages:
            self.live += chain.gradient_bytes[-1]
        self.live += chain.gradient_bytes[stage] + chain.left_bytes[stage]
        light = self.saved[stage] is Action.LIGHT
        during = self.live + (chain.light_temporary_bytes if light else chain.backward_temporary_bytes)[stage]
        self.live -= chain.gradient_bytes[stage + 1] + self._saved_bytes(stage)
        self.saved.pop(stage)
        self.gradient = stage
        if stage > 0 and stage in self.values:
            self._free(stage)
        return during

    def _saved_bytes(self, stage: int) -> int:
        return (self.chain.light_bytes if self.saved[stage] is Action.LIGHT else self.chain.saved_bytes)[stage]

    def _free(self, value: int) -> None:
        self.values.remove(value)
        self.live -= self.chain.value_bytes[value]

    def _need_input(self, op: Operation, place: int) -> None:
        if op.stage not in self.values and op.stage - 1 not in self.saved:
            raise _wrong(op, place, f"its input, the output of stage {op.stage}, is not live")


def _wrong(op: Operation, place: int, why: str) -> PlanError:
    return PlanError(f"{op} cannot run as operation {place + 1}: {why}")


def _operation(word: str) -> Operation:
    match = re.fullmatch(r"F([1-9]\d*)([cnel])|B([1-9]\d*)", word)
    if match is None:
        raise PlanError(f"{word!r} is not an operation", hint="Write F1c, F1n, F1e, F1l or B1, stages counted from 1.")
    return Operation(Action(match[2] or "b"), int(match[1] or match[3]) - 1)
