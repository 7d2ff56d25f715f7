"""A candidate: one way to run a step, with its price and an estimate of its peak."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable
from dataclasses import dataclass

from lowtide.errors import PlanError
from lowtide.techniques.registry import techniques
from lowtide.techniques.technique import Fidelity, Option, Price

PROGRAM_SLACK = 1.05  # a program whose estimate is this much above a budget is still simulated
SMALLEST = 8  # programs with the smallest estimates are simulated for any budget
OFFLOAD = "offload"  # a hold of programs, open by name alone: no GPU has run its copies beside the ops yet


@dataclass(frozen=True, slots=True)
class Candidate:
    """One change of the loss on one engine: an option of a technique, or the engine's own. None: the plain loss.

    ``around`` it are options that change the rest of the step.
    """

    engine: str
    change: Option | Hashable | None
    price: Price  # of all together
    estimate: int
    lowering: str = ""  # of a program
    holds: tuple[str, ...] = ()  # names of techniques by which a program holds values
    rewrites: tuple[str, ...] = ()  # names of the rewrites of its graph
    around: tuple[Option, ...] = ()
    prices: tuple[Price, ...] = ()  # of the change, then of each option around it; none where nothing is around
    compiles: bool = False  # whether a program's lowering does

    @property
    def key(self) -> Hashable:
        """Names the candidate among others of one step."""
        return self.engine, self.change, self.lowering, self.around

    @property
    def kind(self) -> tuple[str, str, str]:
        """Engine, technique and lowering: of each kind, at most one candidate is timed."""
        return self.engine, self.technique, self.lowering

    @property
    def parts(self) -> tuple[str, ...]:
        """Engine, lowering and all techniques: what fails for one of them may fail for the others."""
        return self.engine, self.lowering, *(option.technique for option in self.options)

    @property
    def technique(self) -> str:
        """The name of the option's technique; empty for other changes and the plain step."""
        return self.change.technique if isinstance(self.change, Option) else ""

    @property
    def options(self) -> tuple[Option, ...]:
        """Options to apply, in order."""
        return (self.change, *self.around) if isinstance(self.change, Option) else self.around

    @property
    def is_program(self) -> bool:
        """Tell whether the change is the engine's own."""
        return self.change is not None and not isinstance(self.change, Option)

    @property
    def order(self) -> tuple[float, int, int, str]:
        """Sort key: the fastest first, unknown seconds last; of equally fast ones the strictest."""
        seconds = self.price.seconds
        return (math.inf if math.isnan(seconds) else seconds, self.price.fidelity.rank, self.estimate, str(self.change))


@dataclass(frozen=True, slots=True)
class Contender:
    """A candidate with the peaks that tracing or simulating it gave."""

    candidate: Candidate
    peak_bytes: int
    storage_peak_bytes: int


@dataclass(frozen=True, slots=True)
class Permission:
    """Decides which candidates a plan may use: by fidelity, or by the technique's name."""

    loosest: Fidelity = Fidelity.ROUNDOFF
    names: frozenset[str] = frozenset()
    forbidden: frozenset[str] = frozenset()

    @classmethod
    def of(cls, allow: str | Collection[str] | None, forbid: str | Collection[str] | None = ()) -> Permission:
        """Read ``allow`` and ``forbid`` as users write them.

        ``allow`` is a class, a technique's name, or several of both; ``forbid`` is one or several names.
        """
        wanted, unwanted = _named("allow", allow), _named("forbid", forbid)
        classes = [Fidelity(name) for name in wanted if name in list(Fidelity)]
        names = wanted - frozenset(Fidelity)
        known_names = {*techniques(), OFFLOAD}
        for verb, unknown in (("allow", names - known_names), ("forbid", unwanted - known_names)):
            if unknown:
                either = "neither a fidelity class nor a technique" if verb == "allow" else "no technique"
                known = f"Classes: {', '.join(Fidelity)}. " if verb == "allow" else ""
                raise PlanError(
                    f"Cannot {verb} {min(unknown)!r}: it is {either}",
                    hint=f"{known}Techniques: {', '.join(sorted(known_names))}.",
                )
        if names & unwanted:
            raise PlanError(f"{min(names & unwanted)} is both allowed and forbidden", hint="Leave one of the two out.")
        return cls(max(classes, default=Fidelity.ROUNDOFF), names, unwanted)

    def __call__(self, candidate: Candidate) -> bool:
        prices = candidate.prices[1:]
        around = zip((option.technique for option in candidate.around), prices, strict=True)
        return self.permits_change(candidate) and all(self.permits(name, price.fidelity) for name, price in around)

    def permits_change(self, candidate: Candidate) -> bool:
        """Tell whether a plan may use the change of a candidate, whatever options are around it."""
        price = next(iter(candidate.prices), candidate.price)
        names = frozenset(candidate.holds or (candidate.technique,))
        is_open = price.fidelity <= self.loosest and OFFLOAD not in names
        is_named = names <= self.names and (not candidate.rewrites or self.loosest >= Fidelity.ROUNDOFF)
        return self.forbidden.isdisjoint({*names, *candidate.rewrites}) and (is_named or is_open)

    @property
    def is_default(self) -> bool:
        """Whether nothing but bitwise and roundoff is open, and both are."""
        return self.loosest is Fidelity.ROUNDOFF and not self.names

    @property
    def offloads(self) -> bool:
        """Whether programs may copy values to the host."""
        return OFFLOAD in self.names

    def permits(self, technique: str, fidelity: Fidelity) -> bool:
        """Tell whether a plan may use an option of this technique with this fidelity."""
        return technique not in self.forbidden and (technique in self.names or fidelity <= self.loosest)


def _named(keyword: str, names: str | Collection[str] | None) -> frozenset[str]:
    wanted = [names] if isinstance(names, str) else names or ()
    if not isinstance(wanted, Collection) or not all(isinstance(name, str) for name in wanted):
        example = "allow='changed', or allow=['fewbit', 'compress']"
        example = example if keyword == "allow" else "forbid='microbatch'"
        raise PlanError(f"Cannot {keyword} {names!r}", hint=f"Write {example}.")
    return frozenset(wanted)
