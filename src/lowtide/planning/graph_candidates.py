"""Candidate programs of a captured step, with their prices, their peaks and the reasons for them."""

from __future__ import annotations

import math
import weakref
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

from lowtide.errors import TraceError
from lowtide.planning.baseline import OUT_OF_MEMORY
from lowtide.planning.candidate import OFFLOAD, PROGRAM_SLACK, SMALLEST, Candidate, Contender, Permission
from lowtide.planning.captured import ComparedCapture, capture_and_compare, capture_too_large, check_draws
from lowtide.planning.combinations import lasting_bytes, leaves_gradients, prices_inside
from lowtide.planning.lowering import LOWERINGS, Lowering
from lowtide.planning.plan import PlannedStage, ProgramChoice
from lowtide.planning.prediction import kept_peak, saved_by_each, with_prices
from lowtide.planning.programs.program import Kind, Program, simulate
from lowtide.planning.programs.program_profile import Forecast, check_results
from lowtide.planning.solvers.solver import Problem, Solution, solutions
from lowtide.profiling import Profile
from lowtide.sizes import format_seconds, format_size
from lowtide.techniques.technique import Fidelity, Option, Price
from lowtide.tracing.capture.batchnorm import is_left_batch_norm
from lowtide.tracing.capture.inputs import GraphInputs
from lowtide.tracing.capture.joint import Joint, size_of
from lowtide.tracing.snapshot import steady
from lowtide.workload import Workload

_SHOWN = 12  # stages that a plan gives reasons for: the largest


@dataclass(frozen=True)
class Form:
    """The captured graph as one lowering runs it, with its programs."""

    forecast: Forecast
    problem: Problem
    _solutions: dict[bool, list[Solution]] = field(default_factory=dict, init=False)

    def solutions(self, *, offloads: bool = False) -> list[Solution]:
        """Programs of every solver, the fastest first. ``offloads`` says whether plans may copy to the host."""
        if offloads not in self._solutions:
            self._solutions[offloads] = solutions(replace(self.problem, offloads=True) if offloads else self.problem)
        return self._solutions[offloads]


class GraphCandidates:
    """The programs of a captured step, with each lowering."""

    def __init__(
        self,
        joint: Joint,
        plain: Profile,
        *,
        earned: Fidelity = Fidelity.ROUNDOFF,
        note: str = "",
        inputs: GraphInputs | None = None,
        mutated: Sequence[int] = (),
    ) -> None:
        check_draws(joint, plain)
        check_results(joint, plain)
        self.joint, self.plain, self.note = joint, plain, note
        self.inputs, self.mutated = inputs, mutated  # where a trace finds the graph's inputs, and writes to them
        self._earned = earned  # by the results of the captured graph, where they were compared
        self._forms: dict[tuple[Joint, bool], Form] = {}
        self._excess: dict[str, int] = {}  # by lowering: measured bytes beyond the predicted peak
        self._simulated: dict[Hashable, Contender] = {}  # by candidate
        forecast = Forecast(joint, plain)
        self._plain_seconds = sum(map(forecast.seconds, (*joint.forward, *joint.backward)))

    def form(self, lowering: Lowering, around: Sequence[Option] = ()) -> Form:
        """The graph of a lowering. Lowerings that run the same graph share it.

        Its programs count on ``around`` to free gradients where these options do.
        """
        joint, holds_gradients = lowering.form(self.joint), all(map(leaves_gradients, around))
        if (joint, holds_gradients) not in self._forms:
            if not holds_gradients:  # with options around it, a program has no host to copy to: see ``lowered``
                held = self.form(lowering)
                problem = replace(held.problem, holds_gradients=False, host=None)
                self._forms[joint, False] = Form(held.forecast, problem)
            else:
                forecast = Forecast(joint, self.plain)
                problem = lowering.problem(joint, forecast)
                seconds = sum(map(problem.seconds, (*joint.forward, *joint.backward)))
                saved = self._plain_seconds - seconds if joint is not self.joint else 0.0
                self._forms[joint, True] = Form(forecast, replace(problem, saved_seconds=saved))
        return self._forms[joint, holds_gradients]

    def learn(self, program: ProgramChoice, excess_bytes: int) -> None:
        """Raise the peaks of programs with this one's lowering, which measured above its prediction."""
        self._excess[program.lowering] = self._excess.get(program.lowering, 0) + excess_bytes
        self._simulated.clear()

    def forget(self) -> None:
        """Go back to predicted peaks."""
        self._excess.clear()
        self._simulated.clear()

    @property
    def fidelity(self) -> Fidelity:
        """The class that the captured graph's results earned, and no better than its ops.

        On a GPU, a captured graph may have PyTorch's own batch norm instead of cuDNN's: without running statistics, or
        if the model reads them.
        """
        on_gpu = self.plain.graph.tensor_device != "cpu"
        other = on_gpu and any(map(is_left_batch_norm, self.joint.forward))
        return Fidelity.ROUNDOFF if other else self._earned

    def offers(
        self, engine: str, *, compile: bool | None, around: Sequence[Option] = (), offloads: bool = False
    ) -> list[Candidate]:
        """Every program, once for each lowering: those that compile, those that do not, or both for None."""
        lowerings = [each for each in LOWERINGS.values() if compile in (None, each.compiles)]
        offered = [each for each in lowerings if each.is_offered(self.joint)]
        return [each for lowering in offered for each in self.lowered(engine, lowering, around, offloads=offloads)]

    def lowered(
        self, engine: str, lowering: Lowering, around: Sequence[Option] = (), *, offloads: bool = False
    ) -> list[Candidate]:
        """Every program with one lowering, the fastest first."""
        form, excess = self.form(lowering, around), self._excess.get(lowering.name, 0)
        inside = prices_inside(around, self.plain)
        stays, lasting = kept_peak(self.plain.graph, inside), lasting_bytes(self.plain.graph, inside)
        rewrites = tuple(form.problem.joint.rewrites)
        candidates: list[Candidate] = []
        for solution in form.solutions(offloads=offloads):
            if around and solution.host_bytes:
                continue  # a trace on fake tensors has no host to copy to
            price = lowering.price(form.problem, solution, self.fidelity)
            holds = (*solution.techniques, OFFLOAD) if solution.host_bytes else solution.techniques
            estimate, prices = self.estimate(solution) + excess, ()
            if around:
                estimate, prices = max(stays, estimate - lasting), (price, *inside)
                price = Price.together(prices)
            candidates.append(
                Candidate(
                    engine,
                    solution,
                    price,
                    estimate,
                    lowering=lowering.name,
                    compiles=lowering.compiles,
                    holds=holds,
                    rewrites=rewrites,
                    around=tuple(around),
                    prices=prices,
                )
            )
        return sorted(candidates, key=lambda candidate: candidate.order)

    def estimate(self, solution: Solution) -> int:
        """Allocated peak of the step, estimated by the solver."""
        constants = sum(map(size_of, self.joint.constants.values()))
        return self.plain.static_bytes + constants + solution.estimate_bytes

    def fastest(
        self,
        engine: str,
        lowering: Lowering,
        budget_bytes: int,
        around: Sequence[Option] = (),
        *,
        permitted: Permission,
    ) -> Contender | None:
        """The fastest permitted program of one lowering that fits, or else the smallest; None if it can run none.

        Programs whose estimates are far above the budget are not simulated, except the few smallest.
        """
        offered = self.lowered(engine, lowering, around, offloads=permitted.offloads)
        candidates = list(filter(permitted.permits_change, offered))
        smallest = sorted(candidates, key=lambda candidate: candidate.estimate)[:SMALLEST]
        rest: list[Contender] = []
        for candidate in candidates:
            if candidate in smallest or candidate.estimate <= budget_bytes * PROGRAM_SLACK:
                contender = self.contender(candidate)
                if contender is not None and contender.peak_bytes <= budget_bytes:
                    return contender
                rest += [] if contender is None else [contender]
        return min(rest, key=lambda contender: contender.peak_bytes, default=None)

    def contender(self, candidate: Candidate) -> Contender | None:
        """A program with its simulated peaks, options around it by their prices; None if its lowering cannot run it."""
        lowering, program = LOWERINGS[candidate.lowering], cast(Solution, candidate.change).program
        form = self.form(lowering)
        if not lowering.can_run(form.problem.joint, program):
            return None
        if candidate.key not in self._simulated:
            self._simulated[candidate.key] = self._simulate(candidate, program, form)
        return self._simulated[candidate.key]

    def _simulate(self, candidate: Candidate, program: Program, form: Form) -> Contender:
        after, excess = form.forecast.profile(program), self._excess.get(candidate.lowering, 0)
        if candidate.around:
            after = replace(after, graph=with_prices(after.graph, prices_inside(candidate.around, after)))
        return Contender(candidate, after.peak_bytes + excess, after.storage_peak_bytes + excess)

    def saved_bytes(self, candidate: Candidate) -> tuple[int, ...]:
        """Bytes that each option around a program saves at the peak."""
        form = self.form(LOWERINGS[candidate.lowering], candidate.around)
        after = form.forecast.profile(cast(Solution, candidate.change).program)
        return saved_by_each(after.graph, prices_inside(candidate.around, after))

    def choice(self, contender: Contender, budget_bytes: int) -> ProgramChoice:
        """A program with its reasons, in bytes of the whole step, as a plan carries it."""
        candidate, peak_bytes = contender.candidate, contender.peak_bytes
        price = next(iter(candidate.prices), candidate.price)
        solution = cast(Solution, candidate.change)
        beside = peak_bytes - solution.estimate_bytes
        stages = tuple(
            stage._replace(choice=replace(stage.choice, peak_bytes_if_kept=stage.choice.peak_bytes_if_kept + beside))
            for stage in solution.explain()
        )
        problem = self.form(LOWERINGS[candidate.lowering], candidate.around).problem
        return ProgramChoice(
            instructions=solution.program,
            graph=problem.joint.digest,
            lowering=candidate.lowering,
            solver=solution.solver,
            room_bytes=simulate(solution.program).peak_bytes + budget_bytes - peak_bytes,
            seconds=price.seconds,
            bound=solution.bound,
            fidelity=price.fidelity,
            why=(
                *_rewrites(problem),
                *_reasons(stages, budget_bytes),
                *_held_elsewhere(solution),
                _gap(problem, solution, budget_bytes - beside),
            ),
            stages=stages,
        )


def _rewrites(problem: Problem) -> tuple[str, ...]:
    """Patterns that the graph has replaced, in a line."""
    places = [f"{name} in {count} places" if count > 1 else name for name, count in problem.joint.rewrites.items()]
    return (f"ops are replaced by others: {', '.join(places)}",) if places else ()


def _gap(problem: Problem, solution: Solution, room_bytes: int) -> str:
    """A program's seconds beside the bound of every program."""
    if solution.host_bytes or solution.techniques:
        seconds = problem.bounds.seconds(room_bytes)
        without = "without copies to the host and codes, no program in this order"
        return f"{without} {f'takes less than {format_seconds(seconds)} more' if math.isfinite(seconds) else 'fits'}"
    bound = format_seconds(min(problem.bounds.seconds(room_bytes), solution.seconds))
    return f"no program in this order takes less than {bound} more (a relaxed knapsack's bound)"


def _held_elsewhere(solution: Solution) -> Iterator[str]:
    """Values that are neither kept as they are nor recomputed."""
    if solution.host_bytes:
        fetched = sum(each.kind is Kind.FETCH for each in solution.program.backward)
        yield f"{format_size(solution.host_bytes)} wait on the host, and come back in {fetched} copies beside the ops"
    codes = [each.value for each in solution.program.forward if each.kind is Kind.ENCODE]
    if codes:
        size = sum(solution.program.bytes[value] for value in codes)
        error = f", and a gradient errs by at most {solution.bound:.0%}" if solution.bound else ""
        yield f"few-bit codes stand for {len(codes)} inputs of activations ({format_size(size)}{error})"


def _reasons(stages: tuple[PlannedStage, ...], budget_bytes: int) -> tuple[str, ...]:
    """Give reasons for each large stage, and one line for the small ones."""
    by_size = sorted(stages, key=lambda stage: -stage.choice.saved_bytes)
    largest, rest = by_size[:_SHOWN], by_size[_SHOWN:]
    lines = [
        f"stage {choice.stage + 1} ({outline}): {choice.why(budget_bytes)}"
        for outline, choice in sorted(largest, key=lambda stage: stage.choice.stage)
    ]
    if rest:
        once, size = sum(stage.choice.kept for stage in rest), sum(stage.choice.saved_bytes for stage in rest)
        lines.append(f"smaller stages, {format_size(size)} together: {once} kept, {len(rest) - once} recomputed")
    return tuple(lines)


def graph_candidates(work: Workload, plain: Profile) -> GraphCandidates:
    """The programs of a step, captured once for one profile of it: they live as long as the profile.

    Raises ``TraceError`` for a step that cannot be captured, and for one on a device that is not here.
    """
    too_large = OUT_OF_MEMORY in plain.graph.notes
    if plain.graph.fake and not too_large:
        raise TraceError("A step that is only predicted is not captured")
    known = plain.findings.get(_CandidatesOfStep)
    if known is None or known.work() is not work:
        if work.captures.refused:
            raise TraceError(work.captures.refused)
        try:
            captured = capture_too_large(work, plain) if too_large else _steady_capture(work, plain)
        except TraceError as error:
            work.captures.refused = str(error) if work.captures.shared else ""
            raise
        graph = captured.capture.graph
        candidates = GraphCandidates(
            graph.joint,
            plain,
            earned=captured.fidelity,
            note=captured.note,
            inputs=captured.inputs if graph.is_plain else None,
            mutated=graph.moved,
        )
        known = plain.findings.keep(_CandidatesOfStep(weakref.ref(work), candidates))
        if work.captures.shared:
            work.captures.losses.append(captured.capture)
        else:
            captured.capture.release()
    return known.candidates


@dataclass(frozen=True)
class _CandidatesOfStep:
    """The programs of a step, for its profile."""

    work: weakref.ref[Workload]
    candidates: GraphCandidates


def _steady_capture(work: Workload, plain: Profile) -> ComparedCapture:
    """The graph of a step like all but the first, where modules keep tensors from one to the next."""
    first: ComparedCapture | TraceError
    try:
        first = capture_and_compare(work, plain)
    except TraceError as error:
        first = error
    if isinstance(first, ComparedCapture) and not first.joint.stored:
        return first
    with steady(work) as was_steady:
        if not was_steady:
            return capture_and_compare(work, plain)
    if isinstance(first, TraceError):
        raise first
    return first
