"""The contract of a solver: from a joint graph to programs that trade bytes for seconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from torch import fx

from lowtide.errors import BudgetError
from lowtide.planning.plan import PlannedStage
from lowtide.planning.programs.offloading import HostLink
from lowtide.planning.programs.program import Program, simulate
from lowtide.planning.solvers.bounds import LowerBounds
from lowtide.planning.solvers.joint_ops import JointOps
from lowtide.planning.solvers.runs import RunTimeline
from lowtide.registry import Registry
from lowtide.sizes import format_size
from lowtide.techniques.technique import Fidelity
from lowtide.tracing.capture.joint import Joint, bytes_of

_CLOSE = 0.02  # of a step: not worth code of its own for each block


@dataclass(frozen=True)
class Problem:
    """A joint graph, with the seconds and the workspace bytes of each op."""

    joint: Joint
    seconds: Callable[[fx.Node], float]
    workspace: Callable[[fx.Node], int] = lambda _: 0
    is_free: Callable[[fx.Node], bool] = lambda _: False  # whether recomputing a result costs nothing
    saved_seconds: float = 0.0  # that the graph's ops take less than the plain step's
    host: HostLink | None = None  # where values may be offloaded
    offloads: bool = False  # whether plans may do so; otherwise few ways are tried, to say what that would give
    codes: bool = False  # whether few-bit codes may stand for inputs of activations
    prefers_blocks: bool = False  # whether programs should treat equal blocks alike, where that costs little
    holds_gradients: bool = True  # to the end; otherwise the step around frees each as soon as it is complete

    @cached_property
    def kernels(self) -> JointOps:
        """Ops and values of the graph, numbered."""
        return JointOps(self.joint, self.seconds, self.workspace, holds_gradients=self.holds_gradients)

    @cached_property
    def bounds(self) -> LowerBounds:
        """Bytes and seconds that no program in the graph's order can beat."""
        return LowerBounds(RunTimeline(self.kernels.ops, {}))


@dataclass(frozen=True, eq=False)
class Solution:
    """One program of a solver. It is written, and explained, when that is first asked for."""

    solver: str
    label: str  # orders solutions that are as fast and as large
    seconds: float  # that the step takes longer
    estimate_bytes: int  # of the peak above what stays between steps, near the allocated one
    write: Callable[[], Program]
    explain: Callable[[], tuple[PlannedStage, ...]] = tuple  # peaks are the solver's own estimates
    host_bytes: int = 0  # that wait on the host
    techniques: tuple[str, ...] = ()  # by which it holds values
    fidelity: Fidelity = Fidelity.BITWISE  # beside the graph's own ops
    bound: float = 0.0  # of the relative error of a gradient, if it is approximate
    treats_blocks_alike: bool = False

    @property
    def needs(self) -> frozenset[str]:
        """Ways of holding values that a plan must permit, beside its fidelity."""
        return frozenset((*self.techniques, "host") if self.host_bytes else self.techniques)

    @cached_property
    def program(self) -> Program:
        """Instructions for an engine."""
        return self.write()

    def __str__(self) -> str:
        return self.label


class Solver(Protocol):
    """Finds programs of a joint graph."""

    name: str

    def solve(self, problem: Problem) -> Sequence[Solution]:
        """Programs from the fastest to the smallest. They depend on the problem alone, not on a budget."""
        ...


SOLVERS: Registry[Solver] = Registry("solver")


def solutions(problem: Problem) -> list[Solution]:
    """The programs of every solver, the fastest first."""
    programs = [solution for solver in SOLVERS.values() for solution in solver.solve(problem)]
    if problem.prefers_blocks:
        programs = _alike_if_close(problem, programs)
    return sorted(programs, key=lambda solution: solution.seconds)


def _alike_if_close(problem: Problem, programs: Sequence[Solution]) -> list[Solution]:
    """Programs without those that save little beside one that treats equal blocks alike and needs no more bytes."""
    little = _CLOSE * sum(problem.kernels.ops.seconds)
    alike = [each for each in programs if each.treats_blocks_alike]
    return [
        each
        for each in programs
        if each.treats_blocks_alike
        or all(other.estimate_bytes > each.estimate_bytes or other.seconds - each.seconds > little for other in alike)
    ]


def fastest_program(
    joint: Joint, budget_bytes: int, *, seconds: Callable[[fx.Node], float] = bytes_of, or_smallest: bool = False
) -> Program:
    """Find the fastest program whose peak, above parameters, inputs and gradients, is within ``budget_bytes``.

    By default the seconds of ops go by the bytes of their results. If nothing fits, it raises ``BudgetError`` with the
    smallest budget, or returns the smallest program.
    """
    peaks: dict[int, Program] = {}
    for solution in solutions(Problem(joint, seconds)):
        peak = simulate(solution.program).peak_bytes
        if peak <= budget_bytes:
            return solution.program
        peaks.setdefault(peak, solution.program)
    smallest = min(peaks)
    if or_smallest:
        return peaks[smallest]
    raise BudgetError(
        f"{format_size(budget_bytes)} is below the smallest program of this graph "
        f"({format_size(smallest)}, {smallest} bytes)",
        smallest_bytes=smallest,
    )
