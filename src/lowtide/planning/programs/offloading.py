"""Programs that offload some results to the host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from lowtide.errors import PlanError
from lowtide.planning.programs.program import Instruction, Kind, Program, Role, Value


def with_offloaded(program: Program, cells: Collection[Value]) -> Program:
    """Offload some kept results after their last use in forward, and fetch them before their first in backward.

    Only a result with a storage of its own can: not a view, nor one of several, nor what others are views of.
    """
    copies = {cell: cell._replace(role=Role.HOST) for cell in cells}
    for cell in copies:
        _check(program, cell)
    fetched = {cell: cell._replace(run=_next_run(program, cell)) for cell in cells}
    sizes = {copy: program.bytes[cell] for cell in cells for copy in (copies[cell], fetched[cell])}
    return replace(
        program,
        forward=tuple(_offloaded(program.forward, copies)),
        backward=tuple(_fetched(program.backward, copies, fetched)),
        kept=tuple(copies.get(cell, cell) for cell in program.kept),
        bytes={**program.bytes, **sizes},
    )


def _check(program: Program, cell: Value) -> None:
    holders = Counter(storage for other in program.kept for storage in program.held(other))
    if cell not in program.kept or cell not in program.bytes or cell.role:
        raise PlanError(f"{cell} is not a result that the program keeps in a storage of its own")
    if program.held(cell) != (cell,) or holders[cell] > 1:
        raise PlanError(f"{cell} shares its storage with another result that is kept")


def _next_run(program: Program, cell: Value) -> int:
    """Return an unused run number of the op."""
    runs = (each.value.run for each in (*program.forward, *program.backward) if each.value.op == cell.op)
    return max(runs, default=0) + 1


def _offloaded(forward: Sequence[Instruction], copies: dict[Value, Value]) -> Iterator[Instruction]:
    last = {cell: place for place, each in enumerate(forward) for cell in (each.value, *each.reads) if cell in copies}
    for place, each in enumerate(forward):
        yield each
        for cell in (cell for cell, end in last.items() if end == place):
            yield Instruction(Kind.OFFLOAD, copies[cell], (cell,))
            yield Instruction(Kind.FREE, cell)


def _fetched(
    backward: Sequence[Instruction], copies: dict[Value, Value], fetched: dict[Value, Value]
) -> Iterator[Instruction]:
    fetches: set[Value] = set()
    for each in backward:
        for cell in each.reads:
            if cell in copies and cell not in fetches:
                fetches.add(cell)
                yield Instruction(Kind.FETCH, fetched[cell], (copies[cell],))
                yield Instruction(Kind.FREE, copies[cell])
        into = fetched.get(each.into, each.into) if each.into is not None else None
        reads = tuple(fetched.get(cell, cell) for cell in each.reads)
        yield replace(each, value=fetched.get(each.value, each.value), reads=reads, into=into)
