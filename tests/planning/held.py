"""Programs that hold values on the host, by a link whose copies take as long as a few ops, or in codes."""

from __future__ import annotations

from lowtide.planning.programs.offloading import HostLink
from lowtide.planning.programs.program import Kind, Program
from lowtide.planning.solvers.graph import GraphSolver
from lowtide.planning.solvers.solver import Problem, Solution
from lowtide.tracing.capture.joint import Joint, bytes_of

LINK = HostLink(bandwidth=4.0, latency=1.0, budget_bytes=2**40)  # ops take a second for each byte of their results


def solutions(joint: Joint, link: HostLink | None = LINK) -> list[Solution]:
    return GraphSolver().solve(Problem(joint, lambda node: 1.0 + bytes_of(node), host=link))


def offloading(joint: Joint) -> Program:
    """The program that has most on the host."""
    return max(solutions(joint), key=lambda solution: solution.host_bytes).program


def coded_solutions(joint: Joint) -> list[Solution]:
    """Solutions that take codes."""
    found = GraphSolver().solve(Problem(joint, lambda node: 1.0 + bytes_of(node), codes=True))
    return [solution for solution in found if solution.techniques]


def coding(joint: Joint) -> Program:
    """The program that takes codes of most values."""
    programs = [solution.program for solution in coded_solutions(joint)]
    return max(programs, key=lambda program: sum(each.kind is Kind.ENCODE for each in program.forward))
