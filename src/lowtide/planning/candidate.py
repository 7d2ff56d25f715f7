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


@dataclass(frozen=True, slots=True)
class Candidate:
    """One change of the step on one engine: an option of a technique, or the engine's own. None: the plain step."""

    engine: str
    change: Option | Hashable | None
    price: Price
    estimate: int
    lowering: str = ""  # of a program
    holds: tuple[str, ...] = ()  # names of techniques by which a program holds values

    @property
    def key(self) -> tuple[str, Option | Hashable | None, str]:
        """Names the candidate among others of one step."""
        return self.engine, self.change, self.lowering

    @property
    def kind(self) -> tuple[str, str, str]:
        """Engine, technique and lowering: of each kind, at most one candidate is timed."""
        return self.engine, self.technique, self.lowering

    @property
    def technique(self) -> str:
        """The name of the option's technique; empty for other changes and the plain step."""
        return self.change.technique if isinstance(self.change, Option) else ""

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
        is_named = candidate.technique in self.names or (candidate.holds and self.names.issuperset(candidate.holds))
        return bool(is_named) or candidate.price.fidelity <= self.loosest
