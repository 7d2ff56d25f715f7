"""Candidate programs of a captured step, with their prices, their peaks and the reasons for them."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import cast

from lowtide.errors import TraceError
from lowtide.planning.baseline import OUT_OF_MEMORY
from lowtide.planning.candidate import PROGRAM_SLACK, SMALLEST, Candidate, Contender
from lowtide.planning.captured import Captured, capture_and_compare, check_draws
from lowtide.planning.plan import PlannedStage, ProgramChoice
from lowtide.planning.programs.program import simulate
from lowtide.planning.programs.program_profile import Forecast, check_results
from lowtide.planning.solvers.solver import Problem, Solution, solutions
from lowtide.profiling import Profile
from lowtide.sizes import format_size
from lowtide.techniques.technique import Fidelity, Price
from lowtide.tracing.capture.batchnorm import is_left_batch_norm
from lowtide.tracing.capture.joint import Joint, size_of
from lowtide.tracing.snapshot import steady
from lowtide.workload import Workload

_SHOWN = 12  # stages that a plan gives reasons for: the largest


class GraphCandidates:
    """The programs of a captured step, from the fastest to the smallest."""

    def __init__(self, joint: Joint, plain: Profile, *, earned: Fidelity = Fidelity.ROUNDOFF, note: str = "") -> None:
        check_draws(joint, plain)
        check_results(joint, plain)
        self.joint, self.plain, self.note = joint, plain, note
        self._earned = earned  # by the results of the captured graph, where they were compared
        self.forecast = Forecast(joint, plain)
        self.solutions = solutions(Problem(joint, self.forecast.seconds, self.forecast.workspace))

    @property
    def fidelity(self) -> Fidelity:
        """The class that the captured graph's results earned, and no better than its ops.

        For a batch norm on a GPU that has no running statistics, or whose statistics the model reads, a captured graph
        has PyTorch's own op instead of cuDNN's.
        """
        on_gpu = self.plain.graph.tensor_device != "cpu"
        other = on_gpu and any(map(is_left_batch_norm, self.joint.forward))
        return Fidelity.ROUNDOFF if other else self._earned

    def offers(self) -> list[Candidate]:
        """Every program as a candidate of the graph engine."""
        fidelity = self.fidelity
        return [
            Candidate("graph", solution, Price(fidelity, compute_seconds=solution.seconds), self.estimate(solution))
            for solution in self.solutions
        ]

    def estimate(self, solution: Solution) -> int:
        """Allocated peak of the step, estimated by the solver."""
        constants = sum(map(size_of, self.joint.constants.values()))
        return self.plain.static_bytes + constants + solution.estimate_bytes

    def worthwhile(self, budget_bytes: int) -> list[Solution]:
        """The programs that may fit a budget by their estimates, and the smallest ones; the fastest first."""
        smallest = sorted(self.solutions, key=self.estimate)[:SMALLEST]
        return [s for s in self.solutions if s in smallest or self.estimate(s) <= budget_bytes * PROGRAM_SLACK]

    def profile(self, solution: Solution) -> Profile:
        """The planned step, as if it had been traced."""
        return self.forecast.profile(solution.program)

    def contender(self, candidate: Candidate) -> Contender:
        """A program with its simulated peaks."""
        after = self.profile(cast(Solution, candidate.change))
        return Contender(candidate, after.peak_bytes, after.storage_peak_bytes)

    def choice(self, contender: Contender, budget_bytes: int) -> ProgramChoice:
        """A program as a plan carries it."""
        return self.chosen(cast(Solution, contender.candidate.change), contender.peak_bytes, budget_bytes)

    def chosen(self, solution: Solution, peak_bytes: int, budget_bytes: int) -> ProgramChoice:
        """A program with its reasons, in bytes of the whole step."""
        beside = peak_bytes - solution.estimate_bytes
        stages = tuple(
            stage._replace(choice=replace(stage.choice, peak_bytes_if_kept=stage.choice.peak_bytes_if_kept + beside))
            for stage in solution.explain()
        )
        return ProgramChoice(
            instructions=solution.program,
            graph=self.joint.digest,
            lowering="ops",
            solver=solution.solver,
            room_bytes=simulate(solution.program).peak_bytes + budget_bytes - peak_bytes,
            seconds=solution.seconds,
            fidelity=self.fidelity,
            why=_reasons(stages, budget_bytes),
            stages=stages,
        )


def _reasons(stages: tuple[PlannedStage, ...], budget_bytes: int) -> tuple[str, ...]:
    """Why each large stage is kept or recomputed; the small ones in one line."""
    by_size = sorted(stages, key=lambda stage: -stage.choice.saved_bytes)
    largest, rest = by_size[:_SHOWN], by_size[_SHOWN:]
    lines = [
        f"stage {choice.stage + 1} ({outline}): {choice.why(budget_bytes)}"
        for outline, choice in sorted(largest, key=lambda stage: stage.choice.stage)
    ]
    if rest:
        kept, size = sum(stage.choice.kept for stage in rest), sum(stage.choice.saved_bytes for stage in rest)
        lines.append(f"smaller stages, {format_size(size)} together: {kept} kept, {len(rest) - kept} recomputed")
    return tuple(lines)


def graph_candidates(work: Workload, plain: Profile) -> GraphCandidates:
    """The programs of a step, captured once for one profile of it: they live as long as the profile.

    Raises ``TraceError`` for a step that cannot be captured, and for one that never ran.
    """
    if OUT_OF_MEMORY in plain.graph.notes:
        raise TraceError(
            "The plain step ran out of memory on this device, and only a step that ran is captured",
            hint="Plan with engine='eager', or with a smaller batch.",
        )
    if plain.graph.fake:
        raise TraceError("A step that is only predicted is not captured")
    known = plain.findings.get(GraphCandidates)
    if known is None or known[0]() is not work:
        captured = _steady_capture(work, plain)
        candidates = GraphCandidates(captured.joint, plain, earned=captured.fidelity, note=captured.note)
        known = plain.findings[GraphCandidates] = weakref.ref(work), candidates
        if work.captures is None:
            captured.capture.release()
        else:
            work.captures.append(captured.capture)
    return known[1]


def _steady_capture(work: Workload, plain: Profile) -> Captured:
    """The graph of a step like all but the first, where modules keep tensors from one to the next."""
    first: Captured | TraceError
    try:
        first = capture_and_compare(work, plain)
    except TraceError as error:
        first = error
    if isinstance(first, Captured) and not first.joint.stored:
        return first
    with steady(work) as was_steady:
        if not was_steady:
            return capture_and_compare(work, plain)
    if isinstance(first, TraceError):
        raise first
    return first
