"""The step inside of options: a piece of the batch, or another precision. Its loss is planned as a step of its own."""

from __future__ import annotations

import weakref
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from typing import Any

from lowtide.planning.baseline import OUT_OF_MEMORY, baseline_profile
from lowtide.planning.candidate import Candidate
from lowtide.planning.engine import Candidates, Engine
from lowtide.planning.prediction import apply_options
from lowtide.profiling import Profile
from lowtide.techniques.registry import find_technique
from lowtide.techniques.technique import Option, Price
from lowtide.workload import Workload


def work_inside(work: Workload, options: Iterable[Option]) -> Workload:
    """The step whose loss runs inside of options; the step itself where all leave it as it is."""
    for option in options:
        technique: Any = find_technique(option.technique)
        if hasattr(technique, "inside"):
            work = technique.inside(work, option)
    return work


def changing(work: Workload, options: Iterable[Option]) -> tuple[Option, ...]:
    """Options that run another step inside than the one around them."""
    return tuple(option for option in options if work_inside(work, [option]) is not work)


class InnerStep:
    """The step inside of options, profiled, with the candidates of engines for it.

    It lives with the profile of the step around it, and holds neither the model nor the batch.
    """

    def __init__(self, work: Workload, options: tuple[Option, ...], around: Profile) -> None:
        self.options = options
        self.repeats = prod(getattr(find_technique(each.technique), "repeats", _once)(each) for each in options)
        self._outer = weakref.ref(work)
        self._candidates: dict[str, Candidates | None] = {}  # by engine
        is_predicted = around.graph.fake and OUT_OF_MEMORY not in around.graph.notes
        with self.entered() as inner:
            self.profile: Profile = baseline_profile(inner, fake=is_predicted, device=around.graph.device)

    @contextmanager
    def entered(self) -> Generator[Workload]:
        """Apply the options, and yield the step inside: its model may have other weights until the end."""
        work = self._outer()
        assert work is not None
        with apply_options(work, self.options) as applied:
            yield work_inside(replace(work, optimizer=applied.work.optimizer), self.options)

    def is_of(self, work: Workload) -> bool:
        """Whether it is inside of this very step."""
        return self._outer() is work

    def candidates(self, engine: Engine) -> Candidates | None:
        """An engine's candidates. Raises ``TraceError`` where the engine cannot run the step inside."""
        if engine.name not in self._candidates:
            with self.entered() as inner:
                self._candidates[engine.name] = engine.candidates(inner, self.profile)
        return self._candidates[engine.name]

    def priced(self, candidate: Candidate, outer: Profile) -> Candidate:
        """A candidate for the step inside, with its seconds in the whole step: its change costs them in each piece."""
        change, first, *rest = candidate.prices
        inner_seconds = self.profile.seconds - outer.seconds  # the options' own prices start from the step inside
        repeated = replace(change, compute_seconds=self.repeats * change.compute_seconds)
        first = replace(first, compute_seconds=first.compute_seconds + inner_seconds)
        prices = (repeated, first, *rest)
        return replace(candidate, price=Price.together(prices), prices=prices)


def inner_step(work: Workload, options: Sequence[Option], baseline: Profile) -> InnerStep | None:
    """The step inside of options, profiled once for a profile of the step around them; None for the same step."""
    inner = changing(work, options)
    if not inner:
        return None
    known: dict[tuple[Option, ...], InnerStep] = baseline.findings.setdefault(InnerStep, {})
    if inner not in known or not known[inner].is_of(work):
        known[inner] = InnerStep(work, inner, baseline)
    return known[inner]


def prices_around(options: Iterable[Option], profile: Profile) -> tuple[Price, ...]:
    """Prices of options on the step inside of them, with the program that runs there."""
    return tuple(map(lambda option: _price_around(option, profile), options))


def _price_around(option: Option, profile: Profile) -> Price:
    technique: Any = find_technique(option.technique)
    return getattr(technique, "around", technique.price)(option, profile)


def _once(_: Option) -> int:
    return 1
