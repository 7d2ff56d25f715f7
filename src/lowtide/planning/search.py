"""The search for a budget: every candidate of one step, by seconds, with exact peaks on demand."""

from __future__ import annotations

import math
import traceback
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from operator import is_not
from typing import Any

from lowtide.errors import LowtideError, PlanError, TraceError
from lowtide.planning.candidate import PROGRAM_SLACK, SMALLEST, Candidate, Contender, Permission
from lowtide.planning.engine import AUTO, ENGINES, Candidates, Engine, engines_named
from lowtide.planning.expansion import Expansion
from lowtide.planning.inner_step import InnerSteps
from lowtide.planning.plan import Changes, ProgramChoice
from lowtide.planning.prediction import apply_options, estimate_peak, saved_by_each
from lowtide.profiling import Profile
from lowtide.profiling.timing import has_ranks
from lowtide.registry import PLAIN_ENGINE
from lowtide.sizes import format_seconds, format_size
from lowtide.techniques.registry import measure, study, techniques
from lowtide.techniques.technique import Fidelity, Option, Price, Technique
from lowtide.tracing.snapshot import unchanged
from lowtide.workload import Workload

_SLACK = 1.01  # an option whose estimate is this much above the budget is still traced
_TRACED_RIVALS = 2  # options of one technique that are traced beside the fastest plan
_TRACED = 3  # options with the smallest estimates that are traced: each takes as long as a step, or more
CLOSE = 2.0  # times the fastest: predicted seconds that are worth a comparison, since prices err


class Search:
    """Every option of every technique on one step, and the changes that engines offer.

    Candidates are visited in the order of their seconds, and the set of visited ones only grows with the budget.
    So a larger budget finds the same candidate or an earlier, faster one. A step is captured only for a budget that a
    captured step could fit.
    """

    def __init__(
        self,
        work: Workload,
        baseline: Profile,
        engine: str,
        budget: int,
        permitted: Permission,
        *,
        compile: bool | None = False,
    ) -> None:
        self.work = work
        self.compile = compile
        self._offloads = permitted.offloads
        self.baseline = baseline
        self.notes: list[str] = []
        self.idle: list[str] = []  # techniques and engines that offer nothing here, and why
        self.is_complete = True  # no plan was skipped
        self._sources: dict[str, Candidates] = {}  # by engine
        self._unstudied: set[str] = set()  # techniques that know more of the step once they captured it
        self._unmeasured: set[str] = set()  # techniques that know their seconds once they ran
        plain = Candidate(PLAIN_ENGINE, None, Price(Fidelity.BITWISE), baseline.peak_bytes)
        self._plain = Contender(plain, baseline.peak_bytes, baseline.storage_peak_bytes)
        self._exact: dict[Any, Contender | None] = {plain.key: self._plain}
        self._taken_off: dict[Hashable, int] = {}  # by parts: bytes by which a trace was below the simulation
        self._runnable: dict[Option, bool] = {}
        self._left_out: set[Hashable] = set()
        self._inner_steps = InnerSteps.of(work, baseline)
        self.candidates = [plain]
        engines = engines_named(engine)
        self._option_engines = [each.name for each in engines if each.takes_options]
        self._expansion = Expansion(self, self._option_engines, self._sources, self._inner_steps)
        self.floor_bytes = self._expansion.floor_bytes(permitted)
        if self._option_engines:
            self.candidates += self._options(techniques().values())
            self._note_learners(budget)
        for each in engines:
            if each.captures and engine == AUTO and budget < self.floor_bytes:
                self.is_complete = False
            else:
                self.candidates += self._offers(each, required=engine != AUTO)
        self.candidates.sort(key=lambda candidate: candidate.order)

    def contenders(self, budget: int, permitted: Permission, *, most: int = 1, close: float = CLOSE) -> list[Contender]:
        """The first candidates by seconds that fit: at most one of each engine and technique, or lowering.

        Beside the fastest only those predicted to take at most ``close`` times as long: they may measure in another
        order. Options with a higher estimate than one of their technique that did not fit are skipped. Once the fastest
        is found, few of each technique are traced.
        """
        smallest = {candidate.key for candidate in self._smallest(permitted)}
        failed: dict[Hashable, float] = {}
        rivals: dict[tuple[str, str, str], Contender] = {}
        limit, traced = math.inf, Counter[Hashable]()
        for candidate in self.candidates:
            seconds = self.baseline.seconds + candidate.price.seconds
            if len(rivals) == most or (rivals and seconds > limit):
                break
            if self._expand(permitted, budget, below=candidate.price.seconds):
                return self.contenders(budget, permitted, most=most, close=close)
            name, kind = candidate.technique, candidate.kind
            if name in self._unstudied and kind not in rivals and candidate.estimate <= budget * _SLACK:
                self._study()
                return self.contenders(budget, permitted, most=most, close=close)
            if not permitted(candidate) or kind in rivals or self._is_reserved(candidate, rivals.values(), most):
                continue
            slack = PROGRAM_SLACK if candidate.is_program else _SLACK
            worth = candidate.estimate <= budget * slack and candidate.estimate < failed.get(candidate.parts, math.inf)
            is_enough = bool(rivals) and traced[candidate.parts] >= _TRACED_RIVALS
            if not (worth or (candidate.key in smallest and not rivals)) or is_enough:
                continue
            if name in self._unmeasured:
                self._measure(name)
                return self.contenders(budget, permitted, most=most, close=close)
            if self._is_above(candidate, budget):
                continue
            traced[candidate.parts] += self._traces(candidate)
            contender = self.exact(candidate)
            if contender is not None and contender.peak_bytes <= budget and self._runs(candidate):
                rivals[kind] = contender
                limit = min(limit, seconds * close)
            elif candidate.options:
                failed[candidate.parts] = min(candidate.estimate, failed.get(candidate.parts, math.inf))
        if not rivals and self._expand(permitted, budget):
            return self.contenders(budget, permitted, most=most, close=close)
        if rivals:
            return list(rivals.values())
        least = self.least(permitted)
        return [least] if least.peak_bytes <= budget else []

    def least(self, permitted: Permission, *, traced: int = _TRACED) -> Contender:
        """The candidate with the smallest peak, of the smallest estimates that can be used."""
        self._study()
        self._expand(permitted, most=_TRACED)
        looked_at = [self._plain]
        seen: Counter[Any] = Counter()
        unusable: Counter[Any] = Counter()
        for candidate in self._by_estimate(permitted):
            is_option, parts = bool(candidate.options), candidate.parts
            group, limit = _group(candidate, traced)
            if seen[group] == limit or unusable[parts] == _TRACED:
                self.is_complete &= not is_option
                continue
            contender = self.exact(candidate)
            if contender is not None and self._runs(candidate):
                looked_at.append(contender)
                seen[group] += 1
            else:
                unusable[parts] += 1
        return min(looked_at, key=lambda contender: contender.peak_bytes)

    def _is_reserved(self, candidate: Candidate, rivals: Collection[Contender], most: int) -> bool:
        """Whether only a compiled program may take the last place: its seconds are modelled, and may measure less."""
        if self.compile is not None or candidate.compiles or len(rivals) < max(most - 1, 1):
            return False
        return not any(rival.candidate.compiles for rival in rivals)

    def _traces(self, candidate: Candidate) -> bool:
        """Whether ``exact`` traces a candidate, which it does once."""
        return bool(candidate.options) and not candidate.compiles and candidate.key not in self._exact

    def _is_above(self, candidate: Candidate, budget: int) -> bool:
        """Whether a program with options around it, simulated, is above a budget by more than a trace ever took off."""
        if candidate.key in self._exact or candidate.parts not in self._taken_off or not candidate.is_program:
            return False
        simulated = self._sources[candidate.engine].contender(candidate)
        return simulated is None or simulated.peak_bytes - self._taken_off[candidate.parts] > budget

    def exact(self, candidate: Candidate) -> Contender | None:
        """The peaks under a candidate, by tracing or simulating it; None where it cannot be used, which is noted."""
        if candidate.key not in self._exact:
            self._exact[candidate.key] = self._simulate(candidate) if candidate.is_program else self._trace(candidate)
        return self._exact[candidate.key]

    def faster_peak(self, chosen: Contender, permitted: Permission) -> int:
        """The smallest peak among candidates that are faster than a choice; 0 if there are none."""
        faster = [c for c in filter(permitted, self.candidates) if c.order < chosen.candidate.order]
        looked_at = ((c, self._exact.get(c.key)) for c in faster)
        return min((contender.peak_bytes if contender else c.estimate for c, contender in looked_at), default=0)

    def saved_bytes(self, contender: Contender) -> list[int]:
        """Bytes that each option saves at the peak: those around a change beside all else, the change the rest."""
        candidate = contender.candidate
        total = self.baseline.peak_bytes - contender.peak_bytes
        if not candidate.around:
            return [total]
        if candidate.is_program:
            return list(self._sources[candidate.engine].saved_bytes(candidate))
        inner = self._inner_steps.find(candidate.options, self.baseline)
        if inner is not None:
            return list(inner.saved_bytes(candidate.options, candidate.prices, total))
        change, *around = saved_by_each(self.baseline.graph, candidate.prices)
        return [max(change, total - sum(around)), *around]

    def outlook(self, chosen: Contender, budget: int, permitted: Permission) -> Iterator[str]:
        """Say what more bytes and what one more permission would buy, by candidates that are priced already."""
        mine = chosen.candidate
        if mine.change is None or math.isnan(mine.price.seconds):
            return
        faster = [c for c in self.candidates if c.change is not None and c.price.seconds < mine.price.seconds]
        larger = self._next_larger(filter(permitted, faster), budget)
        if larger is not None:
            peak, less = self._peak(larger), format_seconds(mine.price.seconds - larger.price.seconds)
            more = format_size(peak - budget)
            yield f"A budget of {format_size(peak)}, {more} more, is predicted to take {less} less."
        closed = [
            c
            for c in self.candidates
            if c.change is not None and not permitted(c) and permitted.forbidden.isdisjoint(_names(c))
        ]
        quick = [c for c in closed if c in faster and self._peak(c) <= budget]
        small = [c for c in closed if self._peak(c) < chosen.peak_bytes]
        if quick:
            best = min(quick, key=lambda c: (c.price.fidelity.rank, *c.order))
            less = format_seconds(mine.price.seconds - best.price.seconds)
            yield f"Allowing {named(best)} is predicted to take {less} less."
        elif small:
            best = min(small, key=lambda c: (c.price.fidelity.rank, self._peak(c)))
            yield f"Allowing {named(best)} is predicted to reach {format_size(self._peak(best))}."

    def _next_larger(self, candidates: Iterable[Candidate], budget: int) -> Candidate | None:
        """The candidate with the smallest peak above a budget, of those that can run."""
        larger = sorted((c for c in candidates if self._peak(c) > budget), key=lambda c: (self._peak(c), c.order))
        usable = (c for c in larger if not c.is_program or self._sources[c.engine].contender(c) is not None)
        return next((c for c in usable if self._peak(c) > budget), None)

    def _peak(self, candidate: Candidate) -> int:
        """The exact peak where it is known, else the estimate."""
        contender = self._exact.get(candidate.key)
        return contender.peak_bytes if contender else candidate.estimate

    def program(self, contender: Contender, budget: int) -> ProgramChoice | None:
        """The program of an engine's own candidate; None for options and the plain step."""
        candidate = contender.candidate
        if not candidate.is_program:
            return None
        return self._sources[candidate.engine].choice(contender, budget)

    def _smallest(self, permitted: Permission) -> Iterator[Candidate]:
        """Candidates that are looked at for any budget."""
        seen: Counter[Any] = Counter()
        for candidate in self._by_estimate(permitted):
            group, limit = _group(candidate, _TRACED)
            if seen[group] < limit:
                seen[group] += 1
                yield candidate

    def _by_estimate(self, permitted: Permission) -> list[Candidate]:
        usable = (c for c in self.candidates if c.change is not None and permitted(c))
        return sorted(usable, key=lambda c: (c.estimate, c.order))

    def _offers(self, engine: Engine, *, required: bool) -> Iterable[Candidate]:
        """Candidates of an engine's own; noted where it cannot run this step."""
        try:
            source = engine.candidates(self.work, self.baseline)
        except TraceError as error:
            if required:
                raise PlanError(f"There is no plan on the {engine.name} engine: {error}") from error
            self.notes.append(f"The {engine.name} engine is not used: {error}")
            self.idle.append(f"the {engine.name} engine needs one graph of the whole loss ({error})")
            return ()
        if source is None:
            return ()
        self._sources[engine.name] = source
        self.notes += filter(None, [source.note])
        return source.offers(engine.name, compile=self.compile, offloads=self._offloads)

    def _expand(
        self, permitted: Permission, budget: float = math.inf, *, below: float = math.inf, most: int | None = None
    ) -> bool:
        """Add candidates of combinations that may fit a budget and be faster than ``below``; False if none are left."""
        added = self._expansion.candidates(self.candidates, permitted, budget, below=below, most=most)
        if added is not None:
            self.candidates = sorted([*self.candidates, *added], key=lambda candidate: candidate.order)
        return added is not None

    # -- options of techniques ---------------------------------------------------------------------------

    def _note_learners(self, budget: int) -> None:
        """Note the techniques that price their options better once they captured or ran the step."""
        if budget < self.baseline.peak_bytes:
            self._unstudied = {name for name, technique in techniques().items() if hasattr(technique, "study")}
            if not self.baseline.graph.fake and not has_ranks():
                self._unmeasured = {name for name, each in techniques().items() if hasattr(each, "measure")}

    def _study(self) -> None:
        """Let techniques capture the step, and price their options by the results."""
        if not self._unstudied:
            return
        study(self.work, self.baseline)
        self._price_again(self._unstudied)
        self._unstudied = set()
        self._expansion.price_again()

    def _measure(self, name: str) -> None:
        """Let a technique run a part of the step, and price its options by the seconds that it took."""
        self._unmeasured.discard(name)
        measure(name, self.work, self.baseline)
        self._price_again({name})

    def _price_again(self, names: Collection[str]) -> None:
        others = [c for c in self.candidates if c.around or c.technique not in names]
        options = self._options([techniques()[name] for name in names])
        self.candidates = sorted([*others, *options], key=lambda candidate: candidate.order)

    def _options(self, chosen: Iterable[Technique]) -> Iterator[Candidate]:
        for technique in chosen:
            options = technique.options(self.baseline)
            if not options:
                self.idle.append(f"{technique.name} needs {technique.needs}")
            for option in options:
                price = technique.price(option, self.baseline)
                estimate = estimate_peak(self.baseline.graph, [price])
                yield from (Candidate(engine, option, price, estimate) for engine in self._option_engines)

    def _runs(self, candidate: Candidate) -> bool:
        """Whether the step runs under techniques that act on the whole of it: some losses cannot be split."""
        return self.baseline.graph.fake or all(map(self.runs_option, candidate.options))

    def runs_option(self, option: Option) -> bool:
        """Whether the step runs under an option; where it does not, that is noted."""
        if techniques()[option.technique].kind == "step" and option not in self._runnable:
            try:
                with unchanged(self.work), apply_options(self.work, [option]) as applied:
                    applied.work.compute_loss()
                self._runnable[option] = True
            except Exception as error:  # any failure says the same: not this option
                self.leave_out([option], error)
                self._runnable[option] = False
        return self._runnable.get(option, True)

    def leave_out(self, options: Sequence[Option], error: Exception) -> None:
        """Note why options are not used, once for those of the same techniques that fail at the same line."""
        line = traceback.extract_tb(error.__traceback__)[-1]
        failure = (*(option.technique for option in options), line.filename, line.lineno, type(error.__cause__))
        if failure not in self._left_out:
            self._left_out.add(failure)
            reason = next(iter(str(error).splitlines()), type(error).__name__)  # torch adds pages of tips
            self.notes.append(f"{', '.join(map(str, options))} was left out: {reason}")

    def _simulate(self, candidate: Candidate) -> Contender | None:
        """Simulate a program; with options around it, trace it if it can run and if a trace can follow it."""
        simulated = self._sources[candidate.engine].contender(candidate)
        if simulated is None or not candidate.options or candidate.compiles:
            return simulated
        traced = self._trace(candidate)
        if traced is not None:
            less = simulated.peak_bytes - traced.peak_bytes
            self._taken_off[candidate.parts] = max(less, self._taken_off.get(candidate.parts, 0))
        return traced

    def _trace(self, candidate: Candidate) -> Contender | None:
        """Trace a candidate with options, once for a profile of the plain step."""
        acting = [techniques()[option.technique] for option in candidate.options]
        traced = self.baseline.findings.get(_TracedPeaks) or self.baseline.findings.keep(_TracedPeaks())
        known = traced.get(candidate.key)
        if known is None or any(map(is_not, known[0], acting)):
            try:
                after = self._predict(candidate)
            except Exception as error:  # any failure says the same: not this option
                if len(candidate.options) == 1 or not isinstance(error, LowtideError):  # else two refuse each other
                    self.leave_out(candidate.options, error)
                return None
            known = traced[candidate.key] = acting, after.peak_bytes, after.storage_peak_bytes
        return Contender(candidate, *known[1:])

    def _predict(self, candidate: Candidate) -> Profile:
        program = self.program(Contender(candidate, candidate.estimate, candidate.estimate), candidate.estimate)
        changes = Changes(candidate.options, program)
        return ENGINES[candidate.engine].predict(self.work, changes, self.baseline, only_peaks=True)


class _TracedPeaks(dict[Hashable, tuple[list[Technique], int, int]]):
    """By candidate: the techniques that acted, the peak and the storage peak."""


def _names(candidate: Candidate) -> tuple[str, ...]:
    """Names of techniques that a candidate uses, each once."""
    return tuple(dict.fromkeys((*candidate.holds, *(option.technique for option in candidate.options))))


def named(candidate: Candidate) -> str:
    """The techniques of a candidate, with its fidelity: what a user would allow."""
    names = " and ".join(_names(candidate))
    return f"{names} ({candidate.price.fidelity})" if names else candidate.price.fidelity.value


def _group(candidate: Candidate, traced: int) -> tuple[Hashable, int]:
    """Candidates that are looked at together for any budget, and how many of them."""
    if not candidate.options:
        return candidate.kind, SMALLEST
    return (candidate.is_program, bool(candidate.around)), traced
