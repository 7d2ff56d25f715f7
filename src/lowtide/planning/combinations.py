"""Combinations: options of the step around a changed loss, each priced before anything is planned inside of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from lowtide.planning.inner_step import repeats, runs_inner_step
from lowtide.planning.prediction import estimate_peak, kept_peak, step_peak
from lowtide.profiling import Profile
from lowtide.techniques.registry import find_technique, techniques
from lowtide.techniques.technique import Interval, Option, Price
from lowtide.tracing.graph import Graph

_MOST = 6  # combinations around one loss that are not worse than another one
_WORTH = 0.01  # of the plain step's peak: combinations that lower what stays, or the peak, by less are left out
REACHED = 0.2  # of what is above a floor: about as much is left by a change of the loss that saves most


@dataclass(frozen=True)
class Combination:
    """Options of step techniques that share one step, with their prices on the plain one."""

    options: tuple[Option, ...]
    prices: tuple[Price, ...]
    estimate: int  # of the peak with the plain loss
    floor_bytes: int  # that no change of the loss goes below

    @cached_property
    def price(self) -> Price:
        return Price.together(self.prices)

    @cached_property
    def inner(self) -> tuple[Option, ...]:
        """Options that run another step inside."""
        return tuple(filter(runs_inner_step, self.options))

    def reach(self, share: float = REACHED) -> float:
        """A guess of the smallest peak that a change of the loss gets to, by its share of what is above the floor."""
        return self.floor_bytes + share * (self.estimate - self.floor_bytes)

    @property
    def aim(self) -> float:
        """Bytes by which combinations are compared: of other steps inside, those reached there."""
        return self.reach() if self.inner else self.floor_bytes

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


def combinations(profile: Profile, permits: Any) -> list[Combination]:
    """The combinations that a plan may use, without those that another one beats around the same loss.

    ``permits`` tells whether an option with a fidelity is allowed.
    """
    groups: list[list[tuple[Option, Price] | None]] = []
    for name, technique in techniques().items():
        if technique.kind == "step" and hasattr(technique, "inside"):
            priced = ((option, technique.price(option, profile)) for option in technique.options(profile))
            allowed = [each for each in priced if permits(name, each[1].fidelity)]
            groups += [[None, *allowed]] if allowed else []
    by_inner: dict[tuple[Option, ...], list[Combination]] = {}
    for chosen in _chosen(groups):
        combination = _combination(chosen, profile)
        by_inner.setdefault(combination.inner, []).append(combination)
    plain = Combination((), (), profile.peak_bytes, kept_peak(profile.graph, ()))
    least = _WORTH * profile.peak_bytes
    best: list[Combination] = []
    for alike in by_inner.values():
        best += _undominated(
            [each for each in alike if each.aim + least < (plain.reach() if each.inner else plain.aim)]
        )
    return sorted(best, key=lambda each: (each.aim, each.price.seconds))


def _undominated(alike: Sequence[Combination]) -> list[Combination]:
    """The smallest of those that no other one beats, and the fastest."""
    best = [each for each in alike if not any(each.is_worse(other) for other in alike)]
    best.sort(key=lambda each: (each.floor_bytes, each.price.seconds))
    smallest, rest = best[: _MOST - 1], best[_MOST - 1 :]
    return [*smallest, *sorted(rest, key=lambda each: each.price.seconds)[:1]]


def _chosen(groups: Sequence[Sequence[tuple[Option, Price] | None]]) -> Iterator[list[tuple[Option, Price]]]:
    for product in itertools.product(*groups):
        chosen = [each for each in product if each is not None]
        names = {option.technique for option, _ in chosen}
        conflict = any(names & find_technique(name).conflicts.keys() for name in names)
        if chosen and not conflict and not _sums_in_vain([option for option, _ in chosen]):
            yield chosen


def _sums_in_vain(options: Sequence[Option]) -> bool:
    """Whether gradients are summed over pieces, and then not left: there is nothing to free in between."""
    return any(repeats(each) > 1 for each in options) and not all(map(leaves_gradients, options))


def _combination(chosen: Sequence[tuple[Option, Price]], profile: Profile) -> Combination:
    options, prices = zip(*chosen, strict=True)
    graph, inner = profile.graph, [price for option, price in chosen if runs_inner_step(option)]
    if not inner:
        return Combination(options, prices, estimate_peak(graph, prices), kept_peak(graph, prices))
    floor_bytes = step_peak(graph, prices)  # an inner step has its own backward pass
    around = [price for price in prices if price not in inner]
    above = estimate_peak(graph, around) - step_peak(graph, around)
    plain = max(estimate_peak(graph, ()) - step_peak(graph, ()), 1)
    for price in inner:  # half of the batch in half of the bits is a quarter
        above *= min(max(estimate_peak(graph, [price]) - step_peak(graph, [price]), 0) / plain, 1.0)
    return Combination(options, prices, floor_bytes + int(above), floor_bytes)
