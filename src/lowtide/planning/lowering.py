"""The contract of a lowering: price a program, and turn it into code.

The classes stand in ``lowtide/engines/lowering``; ``lowtide/registry.py`` lists them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from lowtide.planning.plan import Plan
from lowtide.planning.programs.program import Program, Value
from lowtide.planning.programs.program_profile import Forecast
from lowtide.planning.solvers.solver import Problem, Solution
from lowtide.registry import Registry
from lowtide.techniques.technique import Fidelity, Price
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
    """Turns programs into code. The planner offers each program once for each lowering that can run it."""

    name: str
    note: str  # for plans: how its steps differ from the plain one; may be empty
    compiles: bool  # takes long to build, and chooses what to allocate: offered where ``compile`` asks for it
    reference: str  # name of the lowering whose results it has; empty where they are the plain step's

    def is_offered(self, joint: Joint) -> bool:
        """Whether plans may use it for this captured graph."""
        ...

    def form(self, joint: Joint) -> Joint:
        """The joint graph as this lowering runs it. Programs are planned on it."""
        ...

    def problem(self, form: Joint, forecast: Forecast) -> Problem:
        """Seconds and workspaces of the form's ops in this lowering."""
        ...

    def can_run(self, joint: Joint, program: Program) -> bool:
        """Tell whether ``lower`` takes this program, on the devices of this machine."""
        ...

    def price(self, problem: Problem, solution: Solution, fidelity: Fidelity) -> Price:
        """The fidelity of the lowered program, and the seconds that its step takes longer than the plain one.

        ``fidelity`` and ``solution.seconds`` are those of the graph's ops, run one after another.
        """
        ...

    def lower(self, joint: Joint, program: Program) -> Lowered:
        """Code that runs a program over a joint graph."""
        ...


LOWERINGS: Registry[Lowering] = Registry("lowering")


def compiles(plan: Plan | None) -> bool:
    """Whether a plan's lowering compiles; False for None, the plain step."""
    return plan is not None and plan.program is not None and LOWERINGS[plan.program.lowering].compiles
