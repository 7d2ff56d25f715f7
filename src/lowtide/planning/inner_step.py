"""The step inside of options: a piece of the batch, or another precision. Options that change its loss go in there."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from lowtide.planning.baseline import OUT_OF_MEMORY, baseline_profile, with_loss_seconds
from lowtide.planning.prediction import apply_options, estimate_peak, saved_by_each
from lowtide.profiling import Profile
from lowtide.profiling.timing import best_seconds
from lowtide.techniques.registry import find_technique
from lowtide.techniques.technique import Option, Price
from lowtide.tracing.snapshot import unchanged
from lowtide.workload import Workload


def runs_inner_step(option: Option) -> bool:
    """Whether an option runs another step inside than the one around it."""
    return hasattr(find_technique(option.technique), "around")


def repeats(option: Option) -> int:
    """How often an option runs the step inside."""
    technique: Any = find_technique(option.technique)
    return technique.repeats(option) if hasattr(technique, "repeats") else 1


class InnerStep:
    """The step inside of options, profiled. It lives as long as the profile of the step around it."""

    def __init__(self, work: Workload, options: tuple[Option, ...], around: Profile) -> None:
        self.options = options
        self.around = around
        self.repeats = prod(map(repeats, options))
        is_predicted = around.graph.fake and OUT_OF_MEMORY not in around.graph.notes
        outer_seconds = math.nan if around.graph.fake else _seconds(work)
        with apply_options(work, options) as applied:  # other weights, and a loss around the one that is profiled
            inner = replace(work, optimizer=applied.work.optimizer)
            for option in options:
                technique: Any = find_technique(option.technique)
                inner = technique.inside(inner, option)
            self.profile: Profile = baseline_profile(inner, fake=is_predicted, device=around.graph.device)
            share = math.nan if around.graph.fake else _seconds(inner) / outer_seconds
        if share * around.graph.loss_seconds > 0:  # what runs once under a trace is not as fast as what runs often
            self.profile = with_loss_seconds(self.profile, share * around.graph.loss_seconds)

    def prices(self, options: Iterable[Option], change: Price | None = None) -> tuple[Price, ...]:
        """Prices of a change inside and of options around it, with their seconds in the whole step.

        The change costs its seconds in each piece. The first option with another step inside has all of that step's.
        """
        prices = {option: self._price_around(option) for option in options}
        first = self.options[0]
        seconds = self.repeats * self.profile.graph.loss_seconds - self.around.graph.loss_seconds
        prices[first] = replace(prices[first], compute_seconds=prices[first].compute_seconds + seconds)
        if change is None:
            return tuple(prices.values())
        return (replace(change, compute_seconds=self.repeats * change.compute_seconds), *prices.values())

    def estimate(self, prices: Sequence[Price]) -> int:
        """Estimate of the peak under prices on the inner step."""
        return estimate_peak(self.profile.graph, prices)

    def saved_bytes(self, options: Sequence[Option], prices: Sequence[Price], total: int) -> Iterator[int]:
        """Bytes that each option saves at the peak, of the total; those with another step inside share the rest."""
        saved = saved_by_each(self.profile.graph, prices)
        beside = sum(size for option, size in zip(options, saved, strict=True) if option not in self.options)
        alone = {option: self._saved_alone(option) for option in self.options}
        share = max(total - beside, 0) / max(sum(alone.values()), 1)
        for option, size in zip(options, saved, strict=True):
            yield int(alone[option] * share) if option in alone else size

    def _saved_alone(self, option: Option) -> int:
        price = find_technique(option.technique).price(option, self.around)
        return self.around.peak_bytes - estimate_peak(self.around.graph, [price])

    def _price_around(self, option: Option) -> Price:
        technique: Any = find_technique(option.technique)
        return getattr(technique, "around", technique.price)(option, self.profile)


class InnerSteps:
    """The inner steps of one step, each profiled once for a profile of the step around."""

    def __init__(self, work: Workload) -> None:
        self._work = weakref.ref(work)
        self._known: dict[tuple[Option, ...], InnerStep] = {}

    @classmethod
    def of(cls, work: Workload, baseline: Profile) -> InnerSteps:
        """The inner steps that a profile keeps already, or none yet."""
        known = baseline.findings.get(cls)
        return known if known is not None and known._work() is work else baseline.findings.keep(cls(work))

    def find(self, options: Iterable[Option], baseline: Profile) -> InnerStep | None:
        """The step inside of options; None where it is the step itself."""
        inner, work = tuple(filter(runs_inner_step, options)), self._work()
        if not inner or work is None:
            return None
        if inner not in self._known:
            self._known[inner] = InnerStep(work, inner, baseline)
        return self._known[inner]


def _seconds(work: Workload) -> float:
    with unchanged(work):
        (seconds,) = best_seconds(work)
    return seconds
