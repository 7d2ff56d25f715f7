"""The combinations that a search may still look into, and the candidates that each of them gives."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from lowtide.planning.candidate import Candidate, Permission
from lowtide.planning.combinations import REACHED, Combination, combinations
from lowtide.planning.engine import Candidates
from lowtide.planning.inner_step import InnerSteps
from lowtide.planning.prediction import estimate_peak, kept_peak
from lowtide.profiling import Profile
from lowtide.profiling.timing import has_ranks
from lowtide.techniques.registry import techniques
from lowtide.techniques.technique import Option, Price

_SLACK = 1.01  # a combination whose floor is this much above the budget is still looked into
_MOST_INNER_STEPS = 8  # that are profiled in one search: each takes as long as some steps


class _Trials(Protocol):
    """The parts of a search that an expansion needs."""

    baseline: Profile
    compile: bool | None

    def runs_option(self, option: Option) -> bool: ...

    def leave_out(self, options: Sequence[Option], error: Exception) -> None: ...


class Expansion:
    """Combinations of options, each looked into once."""

    def __init__(
        self, search: _Trials, engines: Sequence[str], sources: Mapping[str, Candidates], inner_steps: InnerSteps
    ) -> None:
        self._search = search
        self._engines = engines  # that take options
        self._sources = sources  # of programs, by engine
        self._inner_steps = inner_steps
        self._combined: dict[Permission, list[Combination]] = {}
        self._expanded: set[tuple[Option, ...]] = set()
        self._entered: dict[tuple[Option, ...], bool] = {}  # options with another step inside: whether that runs
        self._reached = REACHED  # corrected by each step inside

    def floor_bytes(self, permitted: Permission) -> int:
        """Bytes that no program goes below, whatever is around it."""
        around = (each.floor_bytes for each in self._combinations(permitted) if not each.inner)
        return min([kept_peak(self._search.baseline.graph, ()), *around])

    def price_again(self) -> None:
        """Price combinations anew, since techniques know more of the step."""
        self._combined.clear()

    def candidates(
        self,
        candidates: Sequence[Candidate],
        permitted: Permission,
        budget: float,
        *,
        below: float = math.inf,
        most: int | None = None,
    ) -> list[Candidate] | None:
        """Candidates of combinations that may fit a budget, and may be faster than ``below``; None if none are left.

        Each is priced before: nothing is as fast as its options with the fastest change of the loss. Of combinations
        with another step inside, which is profiled, one is taken at a time: the fastest that may reach the budget.
        """
        waiting = [
            each
            for each in self._combinations(permitted)
            if each.options not in self._expanded and each.floor_bytes <= budget * _SLACK
        ]
        if waiting and below < math.inf:
            fastest = next((c for c in candidates if not c.around and permitted(c)), None)
            alone = 0.0 if fastest is None else fastest.price.seconds
            waiting = [each for each in waiting if not each.price.seconds + alone >= below]
        outer = [each for each in waiting if not each.inner][:most]
        inner = [each for each in waiting if each.inner and (below == math.inf or each.reach(self._reached) <= budget)]
        if inner:
            aim = 0 if budget == math.inf else budget
            inner.sort(key=lambda each: (max(each.reach(self._reached), aim), each.price.seconds))
            entered = next((each.inner for each in inner if self._enters(each.inner)), None)
            inner = [each for each in inner if each.inner == entered]
        self._expanded.update(each.options for each in (*outer, *inner))
        added: list[Candidate] = []
        for combination in outer:
            added += [*self._around_options(combination, candidates), *self._around_programs(combination)]
        for combination in inner:
            inside = list(self._inside(combination))
            least = min((each.estimate for each in inside), default=combination.estimate)
            above = max(combination.estimate - combination.floor_bytes, 1)
            self._reached = min(max((least - combination.floor_bytes) / above, 0.0), 1.0)
            added += inside
        return added if outer or inner else None

    def _combinations(self, permitted: Permission) -> list[Combination]:
        if permitted not in self._combined:
            self._combined[permitted] = combinations(self._search.baseline, permitted.permits)
        return self._combined[permitted]

    def _enters(self, options: tuple[Option, ...]) -> bool:
        """Whether the step inside of options runs, profiled now if it was not yet; where it does not, that is noted."""
        if options not in self._entered:
            if not self._engines or has_ranks() or len(self._entered) == _MOST_INNER_STEPS:
                return False
            self._entered[options] = self._search.baseline.graph.fake or all(map(self._search.runs_option, options))
            try:
                if self._entered[options]:
                    self._inner_steps.find(options, self._search.baseline)
            except Exception as error:  # any failure says the same: not these options
                self._search.leave_out(options, error)
                self._entered[options] = False
        return self._entered[options]

    def _inside(self, combination: Combination) -> Iterator[Candidate]:
        """The combination on engines that take options: alone, and with each change of the loss of the inner step."""
        inner = self._inner_steps.find(combination.options, self._search.baseline)
        assert inner is not None
        first, *rest = combination.options
        changes: list[tuple[Option, tuple[Option, ...], Price | None]] = [(first, tuple(rest), None)] if rest else []
        names = {option.technique for option in combination.options}
        for technique in techniques().values():
            if technique.kind != "step" and not _conflict({technique.name}, names):
                options = technique.options(inner.profile)
                changes += [(each, combination.options, technique.price(each, inner.profile)) for each in options]
        for change, around, price in changes:
            prices = inner.prices(combination.options, price)
            together, estimate = Price.together(prices), inner.estimate(prices)
            for engine in self._engines:
                yield Candidate(engine, change, together, estimate, around=around, prices=prices)

    def _around_programs(self, combination: Combination) -> Iterator[Candidate]:
        for engine, source in self._sources.items():
            yield from source.offers(engine, compile=self._search.compile, around=combination.options)

    def _around_options(self, combination: Combination, candidates: Sequence[Candidate]) -> Iterator[Candidate]:
        """The combination on engines that take options: alone, and with each option that changes the loss."""
        names = {option.technique for option in combination.options}
        for candidate in [c for c in candidates if isinstance(c.change, Option) and not c.around]:
            change = candidate.change
            assert isinstance(change, Option)
            if change == combination.options[0]:
                options, prices = combination.options[1:], combination.prices
            elif techniques()[change.technique].kind != "step" and not _conflict({change.technique}, names):
                options, prices = combination.options, (candidate.price, *combination.prices)
            else:
                continue
            if options:
                estimate = estimate_peak(self._search.baseline.graph, prices)
                together = Price.together(prices)
                yield Candidate(candidate.engine, change, together, estimate, around=options, prices=prices)


def _conflict(names: set[str], others: set[str]) -> bool:
    known = techniques()
    return any(others & known[name].conflicts.keys() for name in names) or any(
        names & known[name].conflicts.keys() for name in others
    )
