"""The contract of a lowering: from a program to code, a forward pass and the pieces of a backward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from lowtide.planning.programs.program import Program, Value
from lowtide.registry import Registry
from lowtide.tracing.capture.joint import Joint


@dataclass(frozen=True)
class Piece:
    """One piece of the backward pass."""

    index: int
    run: Callable[[list[Any]], Any]  # takes its values in a list, and empties it
    cells: tuple[tuple[Value, bool], ...]  # that it reads, and whether it is the last to do so
    results: tuple[Value, ...]  # that later pieces read
    inputs_read: tuple[int, ...]
    inputs_seen: tuple[int, ...]  # of which it reads views
    inputs: tuple[int, ...]  # whose gradients it completes


@dataclass(frozen=True)
class Lowered:
    """A program as code."""

    forward: Callable[[list[Any]], Any]  # takes the graph's inputs in a list; returns its outputs, then kept cells
    kept: tuple[Value, ...]  # without parameters and inputs
    pieces: list[Piece]  # first the one that starts from the gradient of the loss


class Lowering(Protocol):
    """Turns programs into code."""

    name: str

    def lower(self, joint: Joint, program: Program) -> Lowered:
        """Code that runs a program over a joint graph."""
        ...


LOWERINGS: Registry[Lowering] = Registry("lowering")
