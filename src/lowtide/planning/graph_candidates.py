"""Candidate programs of a step for the graph engine: what each takes, and why it keeps what it keeps."""

from __future__ import annotations

from dataclasses import replace
from weakref import WeakKeyDictionary

from lowtide.chains import Schedule, StageChoice, explain
from lowtide.chains import simulate as simulate_chain
from lowtide.errors import TraceError
from lowtide.planning.captured import Captured, capture_and_compare, check_draws
from lowtide.planning.plan import ProgramChoice
from lowtide.planning.programs.program import Program, simulate
from lowtide.planning.programs.program_profile import Forecast, check_results
from lowtide.planning.solvers.chain import CandidatePrograms
from lowtide.profiling import Profile
from lowtide.sizes import format_size
from lowtide.techniques.technique import Fidelity
from lowtide.tracing.capture.batchnorm import is_left_batch_norm
from lowtide.tracing.capture.joint import Joint, module_of, size_of
from lowtide.tracing.snapshot import steady
from lowtide.workload import Workload

SCHEDULE_SLACK = 1.05  # a schedule whose estimate is this much above a budget is still looked at
SMALLEST = 8  # of the smallest estimates, how many are looked at whatever they say
_SHOWN = 12  # stages that a plan gives reasons for: the largest


class GraphCandidates:
    """The schedules of a captured step, from the fastest to the smallest, and what each becomes."""

    def __init__(self, joint: Joint, plain: Profile, *, earned: Fidelity = Fidelity.ROUNDOFF, note: str = "") -> None:
        check_draws(joint, plain)
        check_results(joint, plain)
        self.joint = joint
        self.note = note
        self._earned = earned  # by the results of the captured graph, where they were compared
        self.plain = plain
        self.forecast = Forecast(joint, plain)
        self.programs = CandidatePrograms(joint, self.forecast.seconds, self.forecast.workspace)
        self.schedules = self.programs.schedules

    @property
    def fidelity(self) -> Fidelity:
        """As the captured graph's own results say, and no better than its ops.

        For a batch norm on a GPU that has no running statistics, or whose statistics the model reads, a captured graph
        has PyTorch's own op instead of cuDNN's.
        """
        on_gpu = self.plain.graph.tensor_device != "cpu"
        other = on_gpu and any(map(is_left_batch_norm, self.joint.forward))
        return Fidelity.ROUNDOFF if other else self._earned

    def seconds(self, schedule: Schedule) -> float:
        """What a schedule takes longer than the plain step."""
        return self.programs.seconds_again(schedule)

    def estimate(self, schedule: Schedule) -> int:
        """What stays and what the chain's stages hold: near the allocated peak, and quickly found."""
        held = sum(map(size_of, self.joint.constants.values()))
        return self.plain.static_bytes + held + simulate_chain(self.programs.chain, schedule).peak_bytes

    def worthwhile(self, budget_bytes: int) -> list[Schedule]:
        """The schedules that may fit a budget, by their estimates, and the smallest ones; the fastest first."""
        smallest = sorted(self.schedules, key=self.estimate)[:SMALLEST]
        return [s for s in self.schedules if s in smallest or self.estimate(s) <= budget_bytes * SCHEDULE_SLACK]

    def profile(self, schedule: Schedule) -> Profile:
        """The planned step, as if it had been traced."""
        return self.forecast.profile(self.program(schedule))

    def program(self, schedule: Schedule) -> Program:
        """What the graph engine runs."""
        return self.programs.program(schedule)

    def chosen(self, schedule: Schedule, peak_bytes: int, budget_bytes: int) -> ProgramChoice:
        """A schedule as a plan keeps it."""
        program = self.program(schedule)
        return ProgramChoice(
            schedule=str(schedule),
            graph=self.joint.digest,
            room_bytes=simulate(program).peak_bytes + budget_bytes - peak_bytes,
            ops_again=program.recomputed,
            seconds=self.seconds(schedule),
            fidelity=self.fidelity,
            why=self._reasons(schedule, peak_bytes, budget_bytes),
        )

    def choices(self, schedule: Schedule) -> tuple[StageChoice, ...]:
        """What becomes of each stage, in a chain's own bytes: those that its stages keep."""
        return explain(self.programs.chain, schedule)

    def outline(self, stage: int) -> str:
        """A stage by its modules and its heavy ops."""
        nodes = [node for node in self.programs.stages.forward[stage] if "." in str(node.target)]
        ops = _outline([str(node.target).split(".")[1] for node in nodes])
        return ": ".join(filter(None, (_span(list(map(module_of, nodes))), ops)))

    def _reasons(self, schedule: Schedule, peak_bytes: int, budget_bytes: int) -> tuple[str, ...]:
        """Why each large value is kept or made again, in bytes of the whole step."""
        beside = peak_bytes - simulate_chain(self.programs.chain, schedule).peak_bytes
        choices = [replace(c, peak_bytes_if_kept=c.peak_bytes_if_kept + beside) for c in self.choices(schedule)]
        largest = sorted(choices, key=lambda choice: -choice.saved_bytes)[:_SHOWN]
        lines: list[str] = []
        for choice in sorted(largest, key=lambda choice: choice.stage):
            lines.append(f"stage {choice.stage + 1} ({self.outline(choice.stage)}): {choice.why(budget_bytes)}")
        if len(choices) > _SHOWN:
            rest = [choice for choice in choices if choice not in largest]
            kept, size = sum(choice.kept for choice in rest), format_size(sum(choice.saved_bytes for choice in rest))
            lines.append(f"{len(rest)} smaller stages, {size}: {kept} kept, {len(rest) - kept} made again")
        return tuple(lines)


# Capturing takes seconds, and a step is looked at often.
_known: WeakKeyDictionary[Workload, GraphCandidates] = WeakKeyDictionary()


def graph_candidates(work: Workload, plain: Profile) -> GraphCandidates:
    """The schedules of a step; captured once for one profile of it."""
    found = _known.get(work)
    if found is None or found.plain is not plain:
        captured = _steady_capture(work, plain)
        found = _known[work] = GraphCandidates(captured.joint, plain, earned=captured.fidelity, note=captured.note)
        if work.captures is None:
            captured.capture.release()
        else:
            work.captures.append(captured.capture)
    return found


def _steady_capture(work: Workload, plain: Profile) -> Captured:
    """The graph of a step like all but the first, where modules keep tensors from one to the next."""
    found: Captured | TraceError
    try:
        found = capture_and_compare(work, plain)
    except TraceError as error:
        found = error
    if isinstance(found, Captured) and not found.joint.stored:
        return found
    with steady(work) as was_steady:
        if not was_steady:
            return capture_and_compare(work, plain)
    if isinstance(found, TraceError):
        raise found
    return found


def _span(modules: list[str]) -> str:
    """The first and the last of the modules that ran.

    >>> _span(["blocks.0.wide", "blocks.0.wide"]), _span(["blocks.0.out", "blocks.0", "blocks.1.norm"])
    ('blocks.0.wide', 'blocks.0.out … blocks.1.norm')
    """
    named = list(filter(None, modules))
    return " … ".join(dict.fromkeys((named[0], named[-1]))) if named else ""


def _outline(ops: list[str]) -> str:
    """The heavy ops of a stage, or the first ones."""
    heavy = [op for op in ops if op.endswith(("mm", "convolution")) or "attention" in op]
    shown = list(dict.fromkeys(heavy or ops))
    return ", ".join(shown[:2]) + (", …" if len(ops) > 2 else "")
