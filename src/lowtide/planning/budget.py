"""``plan``: the fastest step whose allocated peak fits a budget in bytes."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch.utils.weak import WeakIdKeyDictionary

from lowtide.chains import Schedule
from lowtide.errors import BudgetError, LowtideError, PlanError, TraceError
from lowtide.fingerprint import Fingerprint
from lowtide.planning.baseline import baseline_profile
from lowtide.planning.plan import Baseline, Choice, Plan, Recomputation
from lowtide.planning.prediction import apply_options, estimate_peak, predict
from lowtide.planning.recomputation import SCHEDULE_SLACK, SMALLEST, Recomputations, recomputations
from lowtide.profiling import Profile
from lowtide.profiling.devices import find_device
from lowtide.sizes import format_size, parse_size
from lowtide.techniques.registry import study, techniques
from lowtide.techniques.technique import Fidelity, Option, Price, Technique
from lowtide.tracing.unchanged import unchanged
from lowtide.workload import Workload, check_workload

Engine = Literal["auto", "eager", "graph"]

_SLACK = 1.01  # an option whose estimate is this much above the budget is still looked at
_FRAGMENTATION = 0.03  # of a GPU, what the allocator is expected to lose
_LARGEST_SHARE = 1e9  # in percent: more is a slip, and soon no number of bytes
_CONTEXT_BYTES = 600 * 2**20  # of a GPU that is not here, what its CUDA context takes

# Peaks under options that were traced, by the profile of the plain step: it is often planned for several budgets.
_traced: MutableMapping[Profile, dict[Option, tuple[Technique, int, int]]] = WeakIdKeyDictionary()


def plan(
    work: Workload,
    budget: float | str,
    *,
    allow: str | Collection[str] | None = (),
    profile: Profile | None = None,
    fake: bool = False,
    device: str | None = None,
    engine: Engine = "auto",
) -> Plan:
    """Find the fastest step whose peak of allocated bytes, everything included, is at most ``budget``.

    ``budget`` is "6GiB", "800MB", a number of bytes, "60%" of the plain step's peak, or "device". ``allow``
    says what a plan may use where that is not bitwise and roundoff: a fidelity class with all stricter ones, or a
    technique's name beside them. A ``profile`` of the plain step saves tracing it, and tracing again what was traced
    for an earlier plan with it. With ``fake``, or for a ``device`` that is not here, it is predicted, and so it is
    where the plain step does not fit. The model is left as it was.

    ``engine`` says what may run the step: "eager" leaves the model's own code to run, with techniques in its modules;
    "graph" captures the loss, forward and backward, and plans op by op; "auto" takes the faster plan of both.

    For one profile, a larger budget never gives a slower plan. If nothing fits, ``BudgetError`` says which
    budget would be the smallest, and what to allow for less.
    """
    check_workload(work, call="lowtide.plan(work, budget)")
    if engine not in ("auto", "eager", "graph"):
        raise PlanError(f"There is no engine {engine!r}", hint="Write engine='auto', 'eager' or 'graph'.")
    fingerprint = Fingerprint.of(work)
    if profile is not None:
        _check_profile(profile, fingerprint)
    baseline = profile or baseline_profile(work, fake=fake, device=device)
    wanted = resolve_budget(budget, baseline.peak_bytes, baseline.graph.device)
    permitted = _Permission.of(allow)
    if engine != "graph" and baseline.peak_bytes > wanted.bytes:
        study(work, baseline)
    search = _Search(work, baseline, engine if baseline.peak_bytes > wanted.bytes else "eager")
    found = search.fastest(wanted.bytes, permitted)
    if found is None:
        raise _no_plan(search, wanted.bytes, permitted)
    base = Baseline(baseline.peak_bytes, baseline.storage_peak_bytes, baseline.seconds)
    return Plan(
        budget_bytes=wanted.bytes,
        peak_bytes=found.peak_bytes,
        storage_peak_bytes=found.storage_peak_bytes,
        seconds=base.seconds + found.candidate.price.seconds,
        seconds_source=baseline.seconds_source,
        baseline=base,
        choices=_choices(found, search.faster_peak(found, permitted), base, wanted.bytes),
        fingerprint=fingerprint,
        device=baseline.graph.device,
        notes=tuple(note for note in (wanted.said, *search.notes) if note),
        program=search.recomputation(found, wanted.bytes),
    )


@dataclass(frozen=True, slots=True)
class Budget:
    """A budget in bytes, and how it was found where that needs saying."""

    bytes: int
    said: str = ""


def resolve_budget(budget: float | str, baseline_peak: int, device: str) -> Budget:
    """A budget as people write it, in bytes.

    >>> resolve_budget("60%", 1000, "cpu").bytes, resolve_budget("6GiB", 1000, "cpu").bytes
    (600, 6442450944)
    """
    if budget == "device":
        return _device_budget(device)
    if isinstance(budget, str) and budget.strip().endswith("%"):
        try:
            share = float(budget.strip()[:-1])
        except ValueError:
            share = math.nan
        if not 0 < share < _LARGEST_SHARE:
            raise BudgetError(f"Not a share of the plain step's peak: {budget!r}", hint="Write for example 60%.")
        size = int(baseline_peak * share / 100)
        return Budget(size, f"{budget.strip()} of the plain step's {format_size(baseline_peak)}")
    try:
        return Budget(parse_size(budget))
    except LowtideError as error:
        raise BudgetError(str(error)) from error


@dataclass(frozen=True, slots=True)
class _Candidate:
    """One option, or one schedule for the graph engine, with its price. Neither: the plain step."""

    option: Option | Schedule | None
    price: Price
    estimate: int

    @property
    def technique(self) -> str:
        return self.option.technique if isinstance(self.option, Option) else ""

    @property
    def order(self) -> tuple[float, int, str]:
        seconds = self.price.seconds
        return (math.inf if math.isnan(seconds) else seconds, self.estimate, str(self.option))


@dataclass(frozen=True, slots=True)
class _Found:
    candidate: _Candidate
    peak_bytes: int
    storage_peak_bytes: int


class _Search:
    """Every option of every technique on one step; the exact peaks of those that were looked at.

    Options are taken in the order of their seconds, and which ones are looked at only grows with the budget.
    So a larger budget finds the same option or an earlier, faster one.
    """

    def __init__(self, work: Workload, baseline: Profile, engine: Engine) -> None:
        self.work = work
        self.baseline = baseline
        self.notes: list[str] = []
        self.idle: list[str] = []  # techniques that offer nothing here
        plain = _Candidate(None, Price(Fidelity.BITWISE), baseline.peak_bytes)
        self.candidates = [plain]
        self.recomputations: Recomputations | None = None
        if engine != "graph":
            self.candidates += self._options()
        if engine != "eager":
            self.candidates += self._schedules(required=engine == "graph")
        self.candidates.sort(key=lambda candidate: candidate.order)
        self._exact: dict[Option | Schedule | None, _Found | None] = {
            None: _Found(plain, baseline.peak_bytes, baseline.storage_peak_bytes)
        }
        self._tried: dict[Option, bool] = {}
        self._left_out: set[tuple[str, str]] = set()

    def _options(self) -> Iterator[_Candidate]:
        for technique in techniques().values():
            options = technique.options(self.baseline)
            if not options:
                self.idle.append(f"{technique.name} needs {technique.needs}")
            for option in options:
                price = technique.price(option, self.baseline)
                yield _Candidate(option, price, estimate_peak(self.baseline.graph, [price]))

    def _schedules(self, *, required: bool) -> Iterator[_Candidate]:
        try:
            if self.baseline.graph.fake:
                raise TraceError("A step that is only predicted is not captured")
            self.recomputations = recomputations(self.work, self.baseline)
        except TraceError as error:
            if required:
                raise PlanError(f"There is no plan on the graph engine: {error}") from error
            self.idle.append(f"the graph engine needs one graph of the whole loss ({error})")
            return
        for schedule in self.recomputations.schedules:
            seconds = self.recomputations.seconds(schedule)
            price = Price(self.recomputations.fidelity, compute_seconds=seconds)
            yield _Candidate(schedule, price, self.recomputations.estimate(schedule))

    def recomputation(self, found: _Found, budget: int) -> Recomputation | None:
        """What a plan keeps of a schedule, where one was found."""
        schedule = found.candidate.option
        if not isinstance(schedule, Schedule) or self.recomputations is None:
            return None
        return self.recomputations.chosen(schedule, found.peak_bytes, budget)

    def fastest(self, budget: int, permitted: _Permission) -> _Found | None:
        """The first option, by seconds, that fits.

        Where one did not, what the same technique estimates no lower is passed over; never the smallest ones.
        """
        smallest = {candidate.option for candidate in self._by_estimate(permitted)[:SMALLEST]}
        failed: dict[str, int] = {}
        for candidate in filter(permitted, self.candidates):
            name = candidate.technique
            if isinstance(candidate.option, Schedule):
                worth = candidate.estimate <= budget * SCHEDULE_SLACK
            else:
                worth = candidate.estimate <= min(budget * _SLACK, failed.get(name, math.inf) - 1)
            if worth or candidate.option in smallest:
                found = self.exact(candidate)
                if found is not None and found.peak_bytes <= budget and self._runs(candidate):
                    return found
                failed[name] = min(candidate.estimate, failed.get(name, candidate.estimate))
        least = self.least(permitted)
        return least if least.peak_bytes <= budget else None

    def least(self, permitted: _Permission) -> _Found:
        """The option with the smallest peak, of the smallest estimates that can be used."""
        looked_at: list[_Found] = []
        unusable: Counter[str] = Counter()
        for candidate in self._by_estimate(permitted):
            if len(looked_at) == SMALLEST:
                break
            if unusable[candidate.technique] < SMALLEST:
                found = self.exact(candidate)
                if found is not None and self._runs(candidate):
                    looked_at.append(found)
                else:
                    unusable[candidate.technique] += 1
        return min([self._plain, *looked_at], key=lambda found: found.peak_bytes)

    def exact(self, candidate: _Candidate) -> _Found | None:
        """The peaks under an option, by tracing it; None where it cannot be used, which is noted."""
        if candidate.option not in self._exact:
            self._exact[candidate.option] = self._trace(candidate)
        return self._exact[candidate.option]

    def faster_peak(self, chosen: _Found, permitted: _Permission) -> int:
        """The smallest peak among what is faster than a choice."""
        faster = [c for c in filter(permitted, self.candidates) if c.order < chosen.candidate.order]
        looked_at = ((c, self._exact.get(c.option)) for c in faster)
        return min((found.peak_bytes if found else c.estimate for c, found in looked_at), default=0)

    @property
    def _plain(self) -> _Found:
        plain = self._exact[None]
        assert plain is not None
        return plain

    def _by_estimate(self, permitted: _Permission) -> list[_Candidate]:
        return sorted(filter(permitted, self.candidates), key=lambda c: (c.estimate, c.order))

    def _runs(self, candidate: _Candidate) -> bool:
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
        kind = option.technique, re.sub(r"[\d.e+-]+", "", str(error))  # numbers apart
        if kind not in self._left_out:
            self._left_out.add(kind)
            self.notes.append(f"{option} was left out: {error}")

    def _trace(self, candidate: _Candidate) -> _Found | None:
        if isinstance(candidate.option, Schedule):
            assert self.recomputations is not None
            found = self.recomputations.profile(candidate.option)
            return _Found(candidate, found.peak_bytes, found.storage_peak_bytes)
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
        return _Found(candidate, *known[1:])


@dataclass(frozen=True, slots=True)
class _Permission:
    """Which candidates a plan may use: by fidelity, or by the technique's name."""

    loosest: Fidelity = Fidelity.ROUNDOFF
    names: frozenset[str] = frozenset()

    @classmethod
    def of(cls, allow: str | Collection[str] | None) -> _Permission:
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

    def __call__(self, candidate: _Candidate) -> bool:
        return candidate.technique in self.names or candidate.price.fidelity <= self.loosest


def _check_profile(profile: Profile, fingerprint: Fingerprint) -> None:
    differs = profile.fingerprint and profile.fingerprint.difference(fingerprint, was="profiled")
    if differs:
        raise PlanError(f"The profile is of {differs}", hint="Leave profile= out, or profile this step.")


def _choices(found: _Found, faster_peak: int, base: Baseline, budget: int) -> tuple[Choice, ...]:
    option, price = found.candidate.option, found.candidate.price
    if not isinstance(option, Option):
        return ()
    fits, above = format_size(budget), format_size(faster_peak)
    why = f"The fastest that fits {fits}: what is faster peaks at {above} or more."
    return (Choice(option, price.fidelity, base.peak_bytes - found.peak_bytes, price.seconds, why),)


def _no_plan(search: _Search, wanted: int, permitted: _Permission) -> BudgetError:
    least = search.least(permitted)
    hints: list[str] = []
    if least.candidate.option is None and search.idle:
        hints.append(f"Nothing lowers the plain step's peak here: {'; '.join(search.idle)}.")
    everything = search.least(_Permission(Fidelity.CHANGED))
    if everything.peak_bytes < least.peak_bytes:
        chosen = everything.candidate
        what = f"{chosen.technique} ({chosen.price.fidelity})" if chosen.technique else chosen.price.fidelity
        hints.append(f"Allow {what} to reach {format_size(everything.peak_bytes)}.")
    smallest = f"{format_size(least.peak_bytes)}, {least.peak_bytes} bytes"
    return BudgetError(
        f"{format_size(wanted)} is below the smallest plan ({smallest})",
        hint=" ".join([*hints, *search.notes]),
    )


def _device_budget(device: str) -> Budget:
    if device == "cpu":
        raise BudgetError("budget='device' is about a GPU, and the step is on a CPU", hint="Write a size: 6GiB.")
    if device == "cuda" and torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        outside = total - free - torch.cuda.memory_reserved()
        whose = "the CUDA context and other processes have"
    else:
        total, outside = find_device(device).memory_bytes, _CONTEXT_BYTES
        whose = "the CUDA context will take about"
    lost = int((total - outside) * _FRAGMENTATION)
    return Budget(
        total - outside - lost,
        f"The GPU has {format_size(total)}, of which {whose} {format_size(outside)}, "
        f"and {format_size(lost)} are left for fragmentation.",
    )
