"""The search for a budget: every option and every schedule of one step, by seconds, with exact peaks on demand."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, MutableMapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from torch.utils.weak import WeakIdKeyDictionary

from lowtide.chains import Schedule
from lowtide.errors import PlanError, TraceError
from lowtide.planning.baseline import OUT_OF_MEMORY
from lowtide.planning.graph_candidates import SCHEDULE_SLACK, SMALLEST, GraphCandidates, graph_candidates
from lowtide.planning.plan import ProgramChoice
from lowtide.planning.prediction import apply_options, estimate_peak, predict
from lowtide.profiling import Profile
from lowtide.profiling.timing import has_ranks
from lowtide.techniques.registry import measure, study, techniques
from lowtide.techniques.technique import Fidelity, Option, Price, Technique
from lowtide.tracing.snapshot import unchanged
from lowtide.workload import Workload

Engine = Literal["auto", "eager", "graph"]

_SLACK = 1.01  # an option whose estimate is this much above the budget is still traced
_TRACED = 3  # of the smallest estimates of options, how many are traced: each takes as long as a step, or more
CLOSE = 2.0  # times the fastest: predicted seconds that are worth a comparison, since prices err

# Peaks under options that were traced, by the profile of the plain step: it is often planned for several budgets.
_traced: MutableMapping[Profile, dict[Option, tuple[Technique, int, int]]] = WeakIdKeyDictionary()


@dataclass(frozen=True, slots=True)
class Candidate:
    """One option, or one schedule for the graph engine, with its price. Neither: the plain step."""

    option: Option | Schedule | None
    price: Price
    estimate: int

    @property
    def technique(self) -> str:
        """The name of the option's technique; empty for schedules and the plain step."""
        return self.option.technique if isinstance(self.option, Option) else ""

    @property
    def order(self) -> tuple[float, int, str]:
        """Sort key: the fastest first, unknown seconds last."""
        seconds = self.price.seconds
        return (math.inf if math.isnan(seconds) else seconds, self.estimate, str(self.option))


@dataclass(frozen=True, slots=True)
class Found:
    """A candidate with the peaks that tracing or simulating it gave."""

    candidate: Candidate
    peak_bytes: int
    storage_peak_bytes: int


class Search:
    """Every option of every technique on one step, and the schedules of its graph.

    Candidates are visited in the order of their seconds, and the set of visited ones only grows with the budget.
    So a larger budget finds the same candidate or an earlier, faster one. The graph is captured only for a budget
    that a schedule could fit.
    """

    def __init__(self, work: Workload, baseline: Profile, engine: Engine, budget: int) -> None:
        self.work = work
        self.baseline = baseline
        self.notes: list[str] = []
        self.idle: list[str] = []  # techniques and engines that offer nothing here, and why
        plain = Candidate(None, Price(Fidelity.BITWISE), baseline.peak_bytes)
        self.candidates = [plain]
        self.recomputations: GraphCandidates | None = None
        self._unstudied: set[str] = set()  # techniques that know more of the step once they captured it
        self._unmeasured: set[str] = set()  # techniques that know their seconds once they ran
        if engine != "graph":
            self.candidates += self._options(techniques().values())
            if budget < baseline.peak_bytes:
                self._unstudied = {name for name, technique in techniques().items() if hasattr(technique, "study")}
                if not baseline.graph.fake and not has_ranks():
                    self._unmeasured = {name for name, each in techniques().items() if hasattr(each, "measure")}
        self.is_complete = engine != "auto" or budget >= self.floor_bytes  # no plan was skipped
        if engine != "eager" and self.is_complete:
            self.candidates += self._schedules(required=engine == "graph")
        self.candidates.sort(key=lambda candidate: candidate.order)
        self._exact: dict[Option | Schedule | None, Found | None] = {
            None: Found(plain, baseline.peak_bytes, baseline.storage_peak_bytes)
        }
        self._tried: dict[Option, bool] = {}
        self._left_out: set[tuple[str, str]] = set()

    @cached_property
    def floor_bytes(self) -> int:
        """Bytes that no schedule goes below: all that stays between steps, and all gradients."""
        graph = self.baseline.graph
        gradients = (s for s in graph.on_device if s.category == "gradient" and s.death == len(graph.ops))
        return graph.static_bytes + sum(graph.rounded(s.bytes) for s in gradients)

    def contenders(self, budget: int, permitted: Permission, *, most: int = 1, close: float = CLOSE) -> list[Found]:
        """The first candidates by seconds that fit: at most one of each technique and one of the graph engine.

        Beside the fastest only those predicted to take at most ``close`` times as long: they may measure in another
        order. Where an option did not fit, options of its technique with a higher estimate are skipped.
        """
        smallest = {candidate.option for candidate in self._smallest(permitted)}
        failed: dict[str, float] = {}
        rivals: dict[str, Found] = {}
        limit = math.inf
        for candidate in self.candidates:
            seconds = self.baseline.seconds + candidate.price.seconds
            if len(rivals) == most or (rivals and seconds > limit):
                break
            name = candidate.technique
            if name in self._unstudied and name not in rivals and candidate.estimate <= budget * _SLACK:
                self._study()
                return self.contenders(budget, permitted, most=most, close=close)
            if not permitted(candidate):
                continue
            if isinstance(candidate.option, Schedule):
                worth = candidate.estimate <= budget * SCHEDULE_SLACK
            else:
                worth = candidate.estimate <= min(budget * _SLACK, failed.get(name, math.inf) - 1)
            if name in rivals or not (worth or candidate.option in smallest):
                continue
            if name in self._unmeasured:
                self._measure(name)
                return self.contenders(budget, permitted, most=most, close=close)
            found = self.exact(candidate)
            if found is not None and found.peak_bytes <= budget and self._runs(candidate):
                rivals[name] = found
                limit = min(limit, seconds * close)
            else:
                failed[name] = min(candidate.estimate, failed.get(name, math.inf))
        if rivals:
            return list(rivals.values())
        least = self.least(permitted)
        return [least] if least.peak_bytes <= budget else []

    def least(self, permitted: Permission, *, traced: int = _TRACED) -> Found:
        """The candidate with the smallest peak, of the smallest estimates that can be used."""
        self._study()
        looked_at: list[Found] = []
        seen: Counter[type] = Counter()
        unusable: Counter[str] = Counter()
        for candidate in self._by_estimate(permitted):
            most = traced if isinstance(candidate.option, Option) else SMALLEST
            if seen[type(candidate.option)] == most or unusable[candidate.technique] == _TRACED:
                self.is_complete &= not isinstance(candidate.option, Option)
                continue
            found = self.exact(candidate)
            if found is not None and self._runs(candidate):
                looked_at.append(found)
                seen[type(candidate.option)] += 1
            else:
                unusable[candidate.technique] += 1
        return min([self._plain, *looked_at], key=lambda found: found.peak_bytes)

    def exact(self, candidate: Candidate) -> Found | None:
        """The peaks under a candidate, by tracing or simulating it; None where it cannot be used, which is noted."""
        if candidate.option not in self._exact:
            self._exact[candidate.option] = self._trace(candidate)
        return self._exact[candidate.option]

    def faster_peak(self, chosen: Found, permitted: Permission) -> int:
        """The smallest peak among what is faster than a choice; 0 where nothing is."""
        faster = [c for c in filter(permitted, self.candidates) if c.order < chosen.candidate.order]
        looked_at = ((c, self._exact.get(c.option)) for c in faster)
        return min((found.peak_bytes if found else c.estimate for c, found in looked_at), default=0)

    def recomputation(self, found: Found, budget: int) -> ProgramChoice | None:
        """The schedule as a plan stores it, where one was found."""
        schedule = found.candidate.option
        if not isinstance(schedule, Schedule) or self.recomputations is None:
            return None
        return self.recomputations.chosen(schedule, found.peak_bytes, budget)

    def _smallest(self, permitted: Permission) -> Iterator[Candidate]:
        """Candidates that are looked at whatever their estimates say."""
        seen: Counter[type] = Counter()
        for candidate in self._by_estimate(permitted):
            kind = type(candidate.option)
            if seen[kind] < (_TRACED if kind is Option else SMALLEST):
                seen[kind] += 1
                yield candidate

    def _by_estimate(self, permitted: Permission) -> list[Candidate]:
        return sorted(filter(permitted, self.candidates), key=lambda c: (c.estimate, c.order))

    @property
    def _plain(self) -> Found:
        plain = self._exact[None]
        assert plain is not None
        return plain

    def _study(self) -> None:
        """Let techniques capture the step, and price their options by what they found."""
        if not self._unstudied:
            return
        study(self.work, self.baseline)
        self._price_again(self._unstudied)
        self._unstudied = set()

    def _measure(self, name: str) -> None:
        """Let a technique run a part of the step, and price its options by the seconds that it took."""
        self._unmeasured.discard(name)
        measure(name, self.work, self.baseline)
        self._price_again({name})

    def _price_again(self, names: Collection[str]) -> None:
        others = [c for c in self.candidates if c.technique not in names]
        options = self._options([techniques()[name] for name in names])
        self.candidates = sorted([*others, *options], key=lambda candidate: candidate.order)

    def _options(self, chosen: Iterable[Technique]) -> Iterator[Candidate]:
        for technique in chosen:
            options = technique.options(self.baseline)
            if not options:
                self.idle.append(f"{technique.name} needs {technique.needs}")
            for option in options:
                price = technique.price(option, self.baseline)
                yield Candidate(option, price, estimate_peak(self.baseline.graph, [price]))

    def _schedules(self, *, required: bool) -> Iterator[Candidate]:
        try:
            if OUT_OF_MEMORY in self.baseline.graph.notes:
                raise TraceError(
                    "The plain step ran out of memory on this device, and only a step that ran is captured",
                    hint="Plan with engine='eager', or with a smaller batch.",
                )
            if self.baseline.graph.fake:
                raise TraceError("A step that is only predicted is not captured")
            self.recomputations = graph_candidates(self.work, self.baseline)
        except TraceError as error:
            if required:
                raise PlanError(f"There is no plan on the graph engine: {error}") from error
            self.notes.append(f"The graph engine is not used: {error}")
            self.idle.append(f"the graph engine needs one graph of the whole loss ({error})")
            return
        self.notes += filter(None, [self.recomputations.note])
        for schedule in self.recomputations.schedules:
            seconds = self.recomputations.seconds(schedule)
            price = Price(self.recomputations.fidelity, compute_seconds=seconds)
            yield Candidate(schedule, price, self.recomputations.estimate(schedule))

    def _runs(self, candidate: Candidate) -> bool:
        """Whether the step runs under a technique that acts on the whole of it: some losses cannot be split."""
        option = candidate.option
        if not isinstance(option, Option) or self.baseline.graph.fake:
            return True
        if techniques()[option.technique].kind == "step" and option not in self._tried:
            try:
                with unchanged(self.work), apply_options(self.work, [option]) as applied:
                    applied.work.compute_loss()
                self._tried[option] = True
            except Exception as error:  # any failure says the same: not this option
                self._leave_out(option, error)
                self._tried[option] = False
        return self._tried.get(option, True)

    def _leave_out(self, option: Option, error: Exception) -> None:
        """Note why an option is not used, once for all options of a technique that fail alike."""
        reason = next(iter(str(error).splitlines()), type(error).__name__)  # torch adds pages of tips
        kind = option.technique, re.sub(r"[\d.e+-]+", "", reason)  # numbers apart
        if kind not in self._left_out:
            self._left_out.add(kind)
            self.notes.append(f"{option} was left out: {reason}")

    def _trace(self, candidate: Candidate) -> Found | None:
        if isinstance(candidate.option, Schedule):
            assert self.recomputations is not None
            found = self.recomputations.profile(candidate.option)
            return Found(candidate, found.peak_bytes, found.storage_peak_bytes)
        option = candidate.option
        assert option is not None
        technique = techniques()[option.technique]
        traced = _traced.setdefault(self.baseline, {})
        known = traced.get(option)
        if known is None or known[0] is not technique:
            try:
                found = predict(self.work, [option], self.baseline, only_peaks=True)
            except Exception as error:  # any failure says the same: not this option
                self._leave_out(option, error)
                return None
            known = traced[option] = technique, found.peak_bytes, found.storage_peak_bytes
        return Found(candidate, *known[1:])


@dataclass(frozen=True, slots=True)
class Permission:
    """Which candidates a plan may use: by fidelity, or by the technique's name."""

    loosest: Fidelity = Fidelity.ROUNDOFF
    names: frozenset[str] = frozenset()

    @classmethod
    def of(cls, allow: str | Collection[str] | None) -> Permission:
        """Read ``allow`` as users write it: a class, a technique's name, or several of both."""
        wanted = [allow] if isinstance(allow, str) else allow or ()
        if not isinstance(wanted, Collection) or not all(isinstance(item, str) for item in wanted):
            raise PlanError(f"Cannot allow {allow!r}", hint="Write allow='changed', or allow=['fewbit', 'compress'].")
        classes = [Fidelity(item) for item in wanted if item in list(Fidelity)]
        names = frozenset(wanted) - frozenset(Fidelity)
        unknown = sorted(names - techniques().keys())
        if unknown:
            raise PlanError(
                f"Cannot allow {unknown[0]!r}: it is neither a fidelity class nor a technique",
                hint=f"Classes: {', '.join(Fidelity)}. Techniques: {', '.join(sorted(techniques()))}.",
            )
        return cls(max(classes, default=Fidelity.ROUNDOFF), names)

    def __call__(self, candidate: Candidate) -> bool:
        return candidate.technique in self.names or candidate.price.fidelity <= self.loosest
