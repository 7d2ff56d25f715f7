"""Combinations: options of the step around a changed loss, each priced before anything is planned inside of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lowtide.planning.prediction import estimate_peak, kept_peak
from lowtide.profiling import Profile
from lowtide.techniques.registry import find_technique, techniques
from lowtide.techniques.technique import Interval, Option, Price
from lowtide.tracing.graph import Graph

_MOST = 6  # combinations that are not worse than another one
_WORTH = 0.01  # of the plain step's peak: combinations that lower what stays by less are left out


@dataclass(frozen=True)
class Combination:
    """Options of step techniques that share one step, with their prices on the plain one."""

    options: tuple[Option, ...]
    prices: tuple[Price, ...]
    estimate: int  # of the peak with the plain loss
    floor_bytes: int  # that no change of the loss goes below

    @property
    def price(self) -> Price:
        return Price.together(self.prices)

    def is_worse(self, other: Combination) -> bool:
        """Tell whether another one is at least as good in everything, and better in something."""
        mine = self.price.seconds, self.estimate, self.floor_bytes
        others = other.price.seconds, other.estimate, other.floor_bytes
        return all(its <= my for its, my in zip(others, mine, strict=True)) and others != mine


def leaves_gradients(option: Option) -> bool:
    """Tell whether gradients stay as they are until the optimizer's step."""
    return find_technique(option.technique).check(option).leaves_gradients


def prices_inside(options: Sequence[Option], profile: Profile) -> tuple[Price, ...]:
    """Prices of options on the step with a program."""
    return tuple(find_technique(option.technique).price(option, profile) for option in options)


def lasting_bytes(graph: Graph, prices: Iterable[Price]) -> int:
    """Bytes that options take off a step from its first op to its last, such as those of the optimizer's states."""
    changes = ((sign, each) for price in prices for sign, each in _signed(price))
    return sum(sign * each.bytes for sign, each in changes if not each.birth and each.death >= len(graph.ops))


def _signed(price: Price) -> Iterator[tuple[int, Interval]]:
    yield from ((1, interval) for interval in price.removed)
    yield from ((-1, interval) for interval in price.added)


def saved_by_each(graph: Graph, prices: Sequence[Price]) -> tuple[int, ...]:
    """Bytes by which the peak of a step would be higher without each of some options."""
    peak_bytes = estimate_peak(graph, prices)
    without = (estimate_peak(graph, [*prices[:place], *prices[place + 1 :]]) for place in range(len(prices)))
    return tuple(max(0, estimate - peak_bytes) for estimate in without)


def combinations(profile: Profile, permits: Any) -> list[Combination]:
    """The combinations that a plan may use, without those that another one beats.

    ``permits`` tells whether an option with a fidelity is allowed.
    """
    groups: list[list[tuple[Option, Price] | None]] = []
    for name, technique in techniques().items():
        if technique.kind == "step" and hasattr(technique, "inside"):
            priced = ((option, technique.price(option, profile)) for option in technique.options(profile))
            allowed = [each for each in priced if permits(name, each[1].fidelity)]
            groups += [[None, *allowed]] if allowed else []
    most = kept_peak(profile.graph, ()) - _WORTH * profile.peak_bytes
    found = [each for each in (_combination(chosen, profile) for chosen in _chosen(groups)) if each.floor_bytes < most]
    best = [each for each in found if not any(each.is_worse(other) for other in found)]
    return sorted(best, key=lambda each: (each.floor_bytes, each.price.seconds))[:_MOST]


def _chosen(groups: Sequence[Sequence[tuple[Option, Price] | None]]) -> Iterator[list[tuple[Option, Price]]]:
    for product in itertools.product(*groups):
        chosen = [each for each in product if each is not None]
        names = {option.technique for option, _ in chosen}
        if chosen and not any(names & find_technique(name).conflicts.keys() for name in names):
            yield chosen


def _combination(chosen: Sequence[tuple[Option, Price]], profile: Profile) -> Combination:
    options, prices = zip(*chosen, strict=True)
    return Combination(options, prices, estimate_peak(profile.graph, prices), kept_peak(profile.graph, prices))
