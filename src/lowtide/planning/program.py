"""A planned step as a program: which op runs when, which runs again, and when each result is let go.

A program is data: names, bytes and an order. ``simulate`` works on it alone; an engine runs it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import torch
from torch import fx

from lowtide.chains import Kind as Step
from lowtide.chains import Schedule
from lowtide.planning.stages import Stages
from lowtide.sizes import format_size
from lowtide.tracing.joint import bytes_of, is_batch_norm, is_item, is_random, size_of


class Kind(StrEnum):
    """What an instruction does."""

    COMPUTE = "compute"
    RECOMPUTE = "recompute"
    FREE = "free"


class Cell(NamedTuple):
    """A result of one run of an op. What a random op needs to run again with the same numbers is a cell too."""

    op: str
    run: int = 0
    is_state: bool = False

    def __str__(self) -> str:
        return f"{self.op}{f' (run {self.run + 1})' if self.run else ''}{' (generator)' if self.is_state else ''}"


@dataclass(frozen=True, slots=True)
class Instruction:
    """One op that runs, with what it reads; or one cell that is let go."""

    kind: Kind
    cell: Cell
    reads: tuple[Cell, ...] = ()

    def __str__(self) -> str:
        what = f"{self.kind:9} {self.cell}"
        return f"{what} from {', '.join(map(str, self.reads))}" if self.reads else what


@dataclass(frozen=True)
class Program:
    """The instructions of both passes, and the bytes of the storages that they make."""

    forward: tuple[Instruction, ...]
    backward: tuple[Instruction, ...]
    kept: tuple[Cell, ...]  # by forward for backward; parameters and inputs too
    gradients: tuple[Cell | None, ...]
    storages: Mapping[
        Cell, tuple[Cell, ...]
    ]  # that a cell holds, where that is not one of its own: views, several results
    bytes: Mapping[Cell, int]  # of each storage; none for parameters and inputs

    def __str__(self) -> str:
        shown = [f"{i:5} {instruction}" for i, instruction in enumerate((*self.forward, *self.backward))]
        kept = {storage for cell in self.kept for storage in self.held(cell)}
        size = sum(self.bytes.get(storage, 0) for storage in kept)
        border = f"      -- {len(self.kept)} results, {format_size(size)}, go to backward --"
        return "\n".join([*shown[: len(self.forward)], border, *shown[len(self.forward) :]])

    def held(self, cell: Cell) -> tuple[Cell, ...]:
        """The storages that live as long as a cell does."""
        return self.storages.get(cell, (cell,))

    @property
    def recomputed(self) -> int:
        """How many ops run again."""
        return sum(instruction.kind is Kind.RECOMPUTE for instruction in self.backward)


class Simulation(NamedTuple):
    """The bytes of storages that live after each instruction, but for parameters, inputs and gradients at rest."""

    live_bytes: tuple[int, ...]

    @property
    def peak_bytes(self) -> int:
        return max(self.live_bytes, default=0)


def simulate(program: Program) -> Simulation:
    """Run a program over sizes alone."""
    live: dict[Cell, int] = {}  # by storage: how many cells hold it
    total, totals = 0, []
    for instruction in (*program.forward, *program.backward):
        change = -1 if instruction.kind is Kind.FREE else 1
        for storage in program.held(instruction.cell):
            before = live.get(storage, 0)
            live[storage] = before + change
            if not before or not live[storage]:
                total += change * program.bytes.get(storage, 0)
        totals.append(total)
    return Simulation(tuple(totals))


def program_of(stages: Stages, schedule: Schedule) -> Program:
    """The program of a chain's schedule."""
    return _Writer(stages, schedule).program()


class _Writer:
    """Writes instructions in the order of a schedule; then frees each cell after its last use."""

    def __init__(self, stages: Stages, schedule: Schedule) -> None:
        self.stages, self.joint = stages, stages.joint
        first = next(i for i, step in enumerate(schedule.operations) if step.kind is Step.BACKWARD)
        self.sweep, self.rest = schedule.operations[:first], schedule.operations[first:]
        again = {step.stage for step in self.rest if step.kind is not Step.BACKWARD}
        self.replayed = {node for stage in again for node in stages.forward[stage] if is_random(node)}
        self.now = {node: Cell(node.name) for node in (*self.joint.primals, *self.joint.tangents)}
        self.runs: dict[fx.Node, int] = {}
        self.storages: dict[Cell, tuple[Cell, ...]] = {}
        self.bytes: dict[Cell, int] = {}

    def program(self) -> Program:
        forward = [self._run(node, Kind.COMPUTE) for node in self.joint.forward]
        *moved, loss = [self.now[node] for node in self.joint.outputs if isinstance(node, fx.Node)]
        kept = self._kept()
        self.now = {node: cell for node, cell in self.now.items() if cell in kept or node in self.joint.tangents}
        backward = list(self._backward())
        gradients = tuple(self.now[g] if isinstance(g, fx.Node) else None for g in self.joint.gradients)
        backward = _needed(backward, {cell for cell in gradients if cell is not None})
        read = {cell for instruction in backward for cell in instruction.reads} | set(gradients)
        handed = [cell for cell in kept if cell in read]
        states = [Cell(node.name, is_state=True) for node in self.joint.forward if node in self.replayed]
        for state in states:
            self.bytes[state] = _STATE_BYTES
        return Program(
            # New values of buffers go into them at the end, and are let go.
            forward=(*_freed(forward, held={loss, *moved, *handed}, states=states), *_let_go(moved, handed)),
            backward=tuple(
                _freed(
                    backward,
                    given=[cell for cell in (*handed, *states) if cell in self.bytes or cell in self.storages],
                    held={cell for cell in gradients if cell is not None},
                )
            ),
            kept=tuple(handed + states),
            gradients=gradients,
            storages=self.storages,
            bytes=self.bytes,
        )

    def _kept(self) -> list[Cell]:
        """What the forward sweep keeps: all parameters and inputs, checkpoints, and what backward reads of stages."""
        keep = set(self.stages.always_kept)
        for step in self.sweep:
            if step.kind is not Step.NOTHING:
                keep |= self.stages.inputs[step.stage]
            if step.kind is Step.EVERYTHING:
                keep |= self.stages.kept_by(step.stage)
        nodes = [*self.joint.primals, *(node for node in self.joint.forward if node in keep)]
        return [self.now[node] for node in nodes]

    def _backward(self) -> Iterator[Instruction]:
        for step in self.rest:
            if step.kind is Step.BACKWARD:
                prepared: set[fx.Node] = set()
                for node in self.stages.backward[step.stage]:
                    yield from self._prepare(node, prepared)
                    yield self._run(node, Kind.COMPUTE)
                for node in prepared:
                    self.now.pop(node)  # made of results that another run may replace
            else:
                for node in self.stages.forward[step.stage]:
                    if not (is_item(node) and is_batch_norm(node.args[0]) and node.args[1] > 2):  # pyright: ignore
                        yield self._run(node, Kind.RECOMPUTE)
        for node in self.joint.gradients:
            if isinstance(node, fx.Node) and node not in self.now:
                yield from self._prepare_all([node], set())

    def _prepare(self, node: fx.Node, prepared: set[fx.Node]) -> Iterator[Instruction]:
        yield from self._prepare_all([v for v in node.all_input_nodes if v in self.joint.prepared], prepared)

    def _prepare_all(self, waiting: list[fx.Node], prepared: set[fx.Node]) -> Iterator[Instruction]:
        while waiting:
            node = waiting[-1]
            missing = [v for v in node.all_input_nodes if v not in self.now and v in self.joint.prepared]
            waiting += missing
            if not missing:
                waiting.pop()
                if node not in self.now:
                    prepared.add(node)
                    yield self._run(node, Kind.COMPUTE)

    def _run(self, node: fx.Node, kind: Kind) -> Instruction:
        reads = tuple(self.now[value] for value in inputs_of(node, again=kind is Kind.RECOMPUTE))
        if kind is Kind.RECOMPUTE and node in self.replayed:
            reads = (*reads, Cell(node.name, is_state=True))
        run = self.runs.get(node, -1) + 1
        cell = self.now[node] = Cell(node.name, run)
        self.runs[node] = run
        self._note_storages(node, cell, again=kind is Kind.RECOMPUTE)
        return Instruction(kind, cell, reads)

    def _note_storages(self, node: fx.Node, cell: Cell, *, again: bool) -> None:
        values = node.meta.get("val")
        if isinstance(values, (tuple, list)):
            given = values[:3] if again and is_batch_norm(node) else values
            parts = tuple(Cell(f"{node.name}[{i}]", cell.run) for i in range(len(given)))
            self.storages[cell] = parts
            self.bytes.update(zip(parts, map(size_of, given), strict=True))
        elif is_item(node):
            op, index = node.args
            source = self.now[op]  # pyright: ignore[reportArgumentType]
            self.storages[cell] = (Cell(f"{source.op}[{index}]", source.run),)
        elif (made := self.joint.storages[node]) is node:
            self.bytes[cell] = bytes_of(node)
        elif made in self.now:
            self.storages[cell] = self.storages.get(self.now[made], (self.now[made],))


def inputs_of(node: fx.Node, *, again: bool) -> list[fx.Node]:
    """What an op reads. A batch norm that runs again leaves the running statistics alone."""
    if again and is_batch_norm(node):
        return [value for value in node.args[:3] if isinstance(value, fx.Node)]
    return list(node.all_input_nodes)


def _let_go(cells: Iterable[Cell], held: Iterable[Cell]) -> Iterator[Instruction]:
    return (Instruction(Kind.FREE, cell) for cell in dict.fromkeys(cells) if cell not in held)


_STATE_BYTES = torch.get_rng_state().nbytes


def _needed(instructions: Sequence[Instruction], wanted: set[Cell]) -> list[Instruction]:
    """Without what nobody reads."""
    found: list[Instruction] = []
    for instruction in reversed(instructions):
        if instruction.cell in wanted:
            found.append(instruction)
            wanted |= set(instruction.reads)
    return found[::-1]


def _freed(
    instructions: Sequence[Instruction],
    *,
    given: Iterable[Cell] = (),
    held: set[Cell],
    states: Iterable[Cell] = (),
) -> Iterator[Instruction]:
    """The instructions, each followed by letting go of what it was the last to use. ``states`` appear where made."""
    last: dict[Cell, int] = dict.fromkeys(given, -1)
    made = {state.op: state for state in states}
    for position, instruction in enumerate(instructions):
        last[instruction.cell] = position
        for cell in instruction.reads:
            if cell in last:
                last[cell] = position
    ends: dict[int, list[Cell]] = {}
    for cell, position in last.items():
        if cell not in held:
            ends.setdefault(position, []).append(cell)
    yield from _let_go(ends.get(-1, []), ())
    for position, instruction in enumerate(instructions):
        yield instruction
        if instruction.cell.op in made and instruction.kind is Kind.COMPUTE:
            yield Instruction(Kind.COMPUTE, made[instruction.cell.op])
        yield from _let_go(ends.get(position, []), ())
