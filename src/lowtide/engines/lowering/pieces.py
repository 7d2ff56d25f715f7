"""Cut the backward pass into pieces, each ending where it returns gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

from lowtide.planning.lowering import Piece
from lowtide.planning.programs.program import Value
from lowtide.tracing.capture.joint import Joint

T = TypeVar("T")


class Ports(NamedTuple):
    """Values that a step of the backward pass reads and computes, and gradients that it returns."""

    reads: tuple[Value, ...]
    computes: tuple[Value, ...]
    returned: tuple[Value, ...]


def cut(
    joint: Joint,
    steps: Iterable[T],
    ports_of: Callable[[T], Ports],
    code: Callable[[list[T], list[Value], list[Value]], Callable[[list[Any]], Any]],
) -> list[Piece]:
    """Cut steps into pieces. ``code`` makes one of its steps, the values that it takes, and those it leaves."""
    groups: list[list[T]] = [[]]
    for step in steps:
        if groups[-1] and ports_of(groups[-1][-1]).returned and ports_of(step).computes:
            groups.append([])
        groups[-1].append(step)
    ports = [list(map(ports_of, group)) for group in groups]
    last = {value: index for index, each in enumerate(ports) for step in each for value in step.reads}
    primals = {Value(node.name): place for place, node in enumerate(joint.primals)}
    pieces: list[Piece] = []
    for index, (group, each) in enumerate(zip(groups, ports, strict=True)):
        computed = dict.fromkeys(value for step in each for value in step.computes)
        read = dict.fromkeys(value for step in each for value in step.reads if value not in computed)
        # The loss's gradient comes to the first piece; later ones read it where losses are summed.
        given = [] if index else [Value(node.name) for node in joint.tangents]
        values = [value for value in read if value not in primals and value not in given]
        inputs = [value for value in read if value in primals]
        results = [value for value in (*computed, *given) if last.get(value, -1) > index]
        bases = dict.fromkeys(Value(joint.storages[joint.nodes[value.op]].name) for value in values)
        pieces.append(
            Piece(
                index,
                code(group, [*values, *inputs, *given], results),
                tuple((value, last[value] == index) for value in values),
                tuple(results),
                tuple(primals[value] for value in inputs),
                tuple(primals[value] for value in bases if value in primals and value not in inputs),
                tuple(primals[Value(gradient.op)] for step in each for gradient in step.returned),
            )
        )
    return pieces
