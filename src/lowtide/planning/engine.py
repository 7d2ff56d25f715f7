"""The contract of an engine: candidates for a plan, the applied step, and its prediction.

The classes stand in ``lowtide/engines``; ``lowtide/registry.py`` lists them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from lowtide.planning.candidate import Candidate, Contender
from lowtide.planning.plan import Changes, Plan, ProgramChoice
from lowtide.profiling import Profile
from lowtide.registry import Registry
from lowtide.techniques.technique import Option
from lowtide.undo import Applied
from lowtide.workload import Workload

AUTO = "auto"  # every engine: the plan takes the fastest


class Engine(Protocol):
    """Runs planned steps."""

    name: str
    takes_options: bool  # applies options of techniques to the user's own modules
    captures: bool  # runs a captured loss: modules do not change, and other shapes are planned at their first batch

    def candidates(self, work: Workload, baseline: Profile) -> Candidates | None:
        """Changes of its own, beside options: the same object for one profile. None if it has none.

        Raises ``TraceError`` if it cannot run the step.
        """
        ...

    def apply(self, work: Workload, plan: Plan) -> Applied:
        """The planned step, with the undo of its changes."""
        ...

    def predict(self, work: Workload, changes: Changes, baseline: Profile, *, only_peaks: bool = False) -> Profile:
        """Predict the changed step without running it.

        ``only_peaks`` may skip repetitions that change no peak.
        """
        ...


class Candidates(Protocol):
    """Changes of one step that an engine offers."""

    note: str  # for the plan; may be empty

    def offers(
        self, engine: str, *, compile: bool | None, around: Sequence[Option] = (), offloads: bool = False
    ) -> Sequence[Candidate]:
        """The changes as candidates of this engine, each with price and estimate.

        ``compile`` asks for compiled ones alone, or for none; None: both. ``around`` are options of the step that leave
        the loss as it is. ``offloads`` says whether plans may copy values to the host.
        """
        ...

    def contender(self, candidate: Candidate) -> Contender | None:
        """A candidate with its exact peaks; None if it cannot run."""
        ...

    def saved_bytes(self, candidate: Candidate) -> Sequence[int]:
        """Bytes that each option around a change saves at the peak, beside the change and the other options."""
        ...

    def choice(self, contender: Contender, budget_bytes: int) -> ProgramChoice | None:
        """The part of the plan that the engine will run."""
        ...

    def learn(self, program: ProgramChoice, excess_bytes: int) -> None:
        """Note by how much a measured peak of a program was above its prediction."""
        ...

    def forget(self) -> None:
        """Go back to predictions."""
        ...


ENGINES: Registry[Engine] = Registry("engine")


def engines_named(engine: str) -> list[Engine]:
    """The engine of this name, or all for "auto"."""
    return ENGINES.values() if engine == AUTO else [ENGINES[engine]]
