"""Programs that offload, made by the graph solver for a link whose copies take as long as an op's few."""

from __future__ import annotations

from lowtide.planning.programs.offloading import HostLink
from lowtide.planning.programs.program import Program
from lowtide.planning.solvers.graph import GraphSolver
from lowtide.planning.solvers.solver import Problem, Solution
from lowtide.tracing.capture.joint import Joint, bytes_of

LINK = HostLink(bandwidth=4.0, latency=1.0, budget_bytes=2**40)  # ops take a second for each byte of their results


def problem(joint: Joint, link: HostLink | None = LINK) -> Problem:
    return Problem(joint, lambda node: 1.0 + bytes_of(node), host=link)


def solutions(joint: Joint, link: HostLink | None = LINK) -> list[Solution]:
    return GraphSolver().solve(problem(joint, link))


def offloading(joint: Joint) -> Program:
    """The program that has most on the host."""
    return max(solutions(joint), key=lambda solution: solution.host_bytes).program
