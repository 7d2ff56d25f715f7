"""The graph solver: any graph, in its own order, with values freed between two reads and recomputed for the next."""

from __future__ import annotations

from lowtide.planning.solvers.frontier import frontier
from lowtide.planning.solvers.joint_ops import JointOps
from lowtide.planning.solvers.runs import Timeline
from lowtide.planning.solvers.solver import Problem, Solution


class GraphSolver:
    """Needs no cut vertices: skips, branches and loops are like any other graph."""

    name = "graph"

    def solve(self, problem: Problem) -> list[Solution]:
        """Programs that trade bytes for seconds, the fastest first."""
        kernels = JointOps(problem.joint, problem.seconds, problem.workspace)
        return [_solution(kernels, timeline) for timeline in frontier(kernels.ops)]


def _solution(kernels: JointOps, timeline: Timeline) -> Solution:
    again, peak = timeline.again, timeline.peak_bytes
    runs = sum(map(len, again.values()))
    return Solution(
        solver=GraphSolver.name,
        label=f"{runs} ops again, {peak} bytes",
        seconds=timeline.seconds,
        estimate_bytes=peak,
        write=lambda: kernels.program(again),
    )
