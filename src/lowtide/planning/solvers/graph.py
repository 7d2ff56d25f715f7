"""The graph solver: any graph, in its own order. Values are freed between two reads, and recomputed or fetched."""

from __future__ import annotations

from lowtide.chains import StageChoice
from lowtide.planning.plan import PlannedStage
from lowtide.planning.programs.codes import Codes, codes_of
from lowtide.planning.solvers.encode import Coded, bound_of, with_codes
from lowtide.planning.solvers.frontier import frontier
from lowtide.planning.solvers.joint_ops import JointOps
from lowtide.planning.solvers.offload import Offloaded, with_offloaded
from lowtide.planning.solvers.outline import outline
from lowtide.planning.solvers.runs import RunTimeline, without_runs
from lowtide.planning.solvers.solver import Problem, Solution
from lowtide.techniques import fewbit
from lowtide.techniques.technique import Fidelity
from lowtide.tracing.capture.joint import module_of


class GraphSolver:
    """Needs no cut vertices: skips, branches and loops are like any other graph."""

    name = "graph"

    def solve(self, problem: Problem) -> list[Solution]:
        """Programs that trade bytes for seconds, the fastest first."""
        kernels, host = problem.kernels, problem.host
        choices = [Offloaded(timeline, timeline.seconds) for timeline in frontier(kernels.ops)]
        if host is not None:
            values = {op: kernels.offloadable(op) for op in range(kernels.ops.backward)}
            offloaded = with_offloaded(choices, kernels.ops, values, host, thorough=problem.offloads)
            choices += [each for each in offloaded if each.host_bytes]
        solutions = [_solution(kernels, choice) for choice in choices]
        if problem.codes:
            codes = list(codes_of(problem.joint).values())
            exact = [each for each in codes if each.is_exact]
            solutions += _coded(problem, exact)
            if len(codes) > len(exact):
                solutions += _coded(problem, codes)
        return _undominated(solutions)


def _coded(problem: Problem, codes: list[Codes]) -> list[Solution]:
    """Solutions that take some of these codes."""
    if not codes:
        return []
    coded = with_codes(problem.kernels, codes, problem.seconds, problem.workspace)
    return [_solution(problem.kernels, Offloaded(each, each.seconds), coded) for each in coded.frontier()]


def _undominated(solutions: list[Solution]) -> list[Solution]:
    """Solutions without those that another one beats and needs no further permission for. The fastest come first."""
    chosen: list[Solution] = []
    for each in sorted(solutions, key=lambda each: (each.seconds, each.estimate_bytes, each.fidelity.rank)):
        faster = (other for other in chosen if other.fidelity <= each.fidelity and other.needs <= each.needs)
        if all(each.estimate_bytes < other.estimate_bytes for other in faster):
            chosen.append(each)
    return chosen


def _solution(kernels: JointOps, choice: Offloaded, coded: Coded | None = None) -> Solution:
    codes = coded.used(choice.timeline) if coded is not None else []
    taken = coded.codes if coded is not None else {}
    bound = bound_of(codes)
    ops, again, peak = choice.timeline.ops, choice.timeline.again, choice.timeline.peak_bytes
    runs = sum(run < len(ops) for runs in again.values() for run in runs)
    copied = f", {choice.host_bytes} on the host" if choice.host_bytes else ""
    copied += f", {len(codes)} as codes" if codes else ""
    return Solution(
        solver=GraphSolver.name,
        label=f"{runs} ops again, {peak} bytes{copied}",
        seconds=choice.seconds,
        estimate_bytes=peak,
        write=lambda: kernels.program(RunTimeline(ops, again), taken),
        explain=lambda: explained(kernels, RunTimeline(ops, again)),
        host_bytes=choice.host_bytes,
        techniques=(fewbit.FewBitActivations.name,) if codes else (),
        fidelity=Fidelity.APPROXIMATE if bound else Fidelity.BITWISE,
        bound=bound,
    )


def explained(kernels: JointOps, timeline: RunTimeline) -> tuple[PlannedStage, ...]:
    """Parts of the model with the bytes that they save for backward, and the seconds of recomputing some."""
    ops, backward = timeline.ops, timeline.ops.backward
    parts: dict[str, list[int]] = {}
    for op in range(backward):
        path = module_of(kernels.nodes[op])
        parts.setdefault(path.rpartition(".")[0] or path, []).append(op)
    saved = {op for reader in range(backward, len(ops)) for op in ops.sources[reader]}
    times = timeline.turns_of
    stages: list[PlannedStage] = []
    for place, members in enumerate(parts.values()):
        again = [(turn, op) for op in members for turn in times.get(op, ())]
        peak = RunTimeline(ops, without_runs(timeline.again, again)).peak_bytes if again else timeline.peak_bytes
        choice = StageChoice(
            stage=place,
            runs=1 + max(len(times.get(op, ())) for op in members),
            saved_bytes=sum(ops.size[op] for op in members if op in saved),
            seconds_again=sum(ops.seconds[op] for _, op in again),
            peak_bytes_if_kept=peak,
        )
        stages.append(PlannedStage(outline([kernels.nodes[op] for op in members]), choice))
    return tuple(stages)
