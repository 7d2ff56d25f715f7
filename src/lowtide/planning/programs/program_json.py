"""Programs as compact JSON: tables of whole numbers, written as text.

Rows are separated by ";" and numbers by spaces. A value is a row "op run role part" of ``values``. Its op is a place in
``ops``, parts count from 1, and trailing zeros are left out. An instruction is "kind value into reads…", with -1 for
no ``into``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from lowtide.planning.programs.program import Instruction, Kind, Program, Role, Value, check_program

PROGRAM_VERSION = 3
_KINDS = tuple(Kind)
_ROLES = tuple(Role)


def program_to_json(program: Program) -> dict[str, Any]:
    """A program as JSON-ready data."""
    values: dict[Value, int] = {}
    ops: dict[str, int] = {}

    def number(value: Value | None) -> int:
        return -1 if value is None else values.setdefault(value, len(values))

    def rows(instructions: Iterable[Instruction]) -> str:
        return _text(
            (_KINDS.index(each.kind), number(each.value), number(each.into), *map(number, each.reads))
            for each in instructions
        )

    tables = {
        "forward": rows(program.forward),
        "backward": rows(program.backward),
        "kept": _text([list(map(number, program.kept))]),
        "gradients": _text([list(map(number, program.gradients))]),
        "storages": _text((number(value), *map(number, held)) for value, held in program.storages.items()),
        "bytes": _text((number(value), size) for value, size in program.bytes.items()),
    }
    rows_of_values: list[list[int]] = []
    for value in values:
        part = 0 if value.part is None else value.part + 1
        row = [ops.setdefault(value.op, len(ops)), value.run, _ROLES.index(value.role), part]
        while len(row) > 1 and not row[-1]:
            row.pop()
        rows_of_values.append(row)
    return {"version": PROGRAM_VERSION, "ops": " ".join(ops), "values": _text(rows_of_values), **tables}


def program_from_json(data: Mapping[str, Any]) -> Program:
    """Read a program and check that its instructions can run. Raises ``ValueError`` or ``KeyError`` if not."""
    if data["version"] != PROGRAM_VERSION:
        raise ValueError(f"its program has version {data['version']!r}, and this lowtide reads {PROGRAM_VERSION}")
    ops = data["ops"].split(" ")
    values = [_value(row, ops) for row in _rows(data, "values")]
    if len(set(values)) < len(values):
        raise ValueError("its program lists a value twice")

    def value(number: int) -> Value:
        return values[_place(number, values)]

    def instructions(key: str) -> tuple[Instruction, ...]:
        return tuple(_instruction(row, value) for row in _rows(data, key))

    program = Program(
        forward=instructions("forward"),
        backward=instructions("backward"),
        kept=tuple(map(value, _row(data, "kept"))),
        gradients=tuple(None if number == -1 else value(number) for number in _row(data, "gradients")),
        storages={value(first): tuple(map(value, held)) for first, *held in _rows(data, "storages")},
        bytes={value(number): size for number, size in _rows(data, "bytes")},
    )
    check_program(program)
    return program


def _value(row: Sequence[int], ops: Sequence[str]) -> Value:
    op, run, role, part = (*row, 0, 0, 0)[: max(len(row), 4)]
    if run < 0 or part < 0:
        raise ValueError(f"{row} is not a value of a program")
    return Value(ops[_place(op, ops)], run, _ROLES[_place(role, _ROLES)], part - 1 if part else None)


def _instruction(row: Sequence[int], value: Callable[[int], Value]) -> Instruction:
    kind, cell, into, *reads = row
    return Instruction(
        _KINDS[_place(kind, _KINDS)], value(cell), tuple(map(value, reads)), None if into == -1 else value(into)
    )


def _place(number: int, table: Sequence[Any]) -> int:
    if not 0 <= number < len(table):
        raise ValueError(f"its program refers to row {number} of {len(table)}")
    return number


def _text(rows: Iterable[Sequence[int]]) -> str:
    return ";".join(" ".join(map(str, row)) for row in rows)


def _rows(data: Mapping[str, Any], key: str) -> list[list[int]]:
    text = data[key]
    return [[int(number) for number in row.split(" ")] for row in text.split(";")] if text else []


def _row(data: Mapping[str, Any], key: str) -> list[int]:
    return [number for row in _rows(data, key) for number in row]
