"""Engines are known by their registry alone: a new one is planned for, applied, verified and reported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import lowtide
from lowtide.engines import apply, plan, verify
from lowtide.engines.eager import EagerEngine
from lowtide.errors import PlanError
from lowtide.planning import Plan, predict_plan
from lowtide.planning.candidate import Candidate, Contender
from lowtide.planning.engine import ENGINES, engines_named
from lowtide.planning.plan import Changes, ProgramChoice
from lowtide.profiling import Profile
from lowtide.techniques.technique import Fidelity, Option, Price
from lowtide.undo import Applied
from lowtide.workload import Workload
from tests.refusals import refused

from .steps import chain


class ToyCandidates:
    """One change that makes the step take half of its bytes, and no second longer."""

    note = "A toy was asked."

    def __init__(self, baseline: Profile) -> None:
        self.half = baseline.peak_bytes // 2

    def offers(
        self, engine: str, *, compile: bool | None, around: Sequence[Option] = (), offloads: bool = False
    ) -> list[Candidate]:
        return [Candidate(engine, "halve everything", Price(Fidelity.BITWISE), self.half)]

    def contender(self, candidate: Candidate) -> Contender:
        return Contender(candidate, self.half, self.half)

    def saved_bytes(self, candidate: Candidate) -> list[int]:
        return []

    def choice(self, contender: Contender, budget_bytes: int) -> None:
        return None

    def forget(self) -> None: ...

    def learn(self, program: ProgramChoice, excess_bytes: int) -> None:
        raise AssertionError("nothing of a toy is measured")


class ToyEngine:
    """Runs the plain step, and counts its losses."""

    name = "toy"
    takes_options = False
    captures = False

    def __init__(self) -> None:
        self.losses: list[Any] = []

    def candidates(self, work: Workload, baseline: Profile) -> ToyCandidates:
        return ToyCandidates(baseline)

    def apply(self, work: Workload, plan: Plan) -> Applied:
        def loss(model: Any, batch: Any) -> Any:
            self.losses.append(batch)
            return work.loss(model, batch)

        return Applied(replace(work, loss=loss))

    def predict(self, work: Workload, changes: Changes, baseline: Profile, *, only_peaks: bool = False) -> Profile:
        return baseline


def test_a_registered_engine_is_planned_applied_verified_and_predicted() -> None:
    work, toy = chain(3), ToyEngine()
    before = lowtide.profile(work, fake=True)
    with ENGINES.register(toy):
        planned = plan(work, "60%", profile=before, engine="toy", tune=False)
        assert (planned.engine, planned.program, planned.notes[-1]) == ("toy", None, "A toy was asked.")
        assert plan(work, "60%", profile=before, tune=False).engine == "toy"  # the fastest of all
        assert Plan.from_json(planned.to_json()) == planned
        with apply(planned, work) as step:
            step(work.batch)
        assert len(toy.losses) == 1
        assert verify(work, planned).results_agree
        assert predict_plan(work, planned, before).after.peak_bytes == before.peak_bytes
    with refused("toy", kind=PlanError):
        apply(planned, work)


class Predicting(EagerEngine):
    """Takes options, and notes what it predicts."""

    name = "predicting"

    def __init__(self) -> None:
        self.predicted: list[Changes] = []

    def predict(self, work: Workload, changes: Changes, baseline: Profile, *, only_peaks: bool = False) -> Profile:
        self.predicted.append(changes)
        return super().predict(work, changes, baseline, only_peaks=only_peaks)


def test_a_registered_engine_that_takes_options_is_offered_them_and_predicts_them_itself() -> None:
    work, engine = chain(), Predicting()
    before = lowtide.profile(work, fake=True)
    with ENGINES.register(engine):
        planned = plan(work, "60%", profile=before, engine="predicting", tune=False)
        assert planned.engine == "predicting"
        assert planned.options
        assert planned.changes in engine.predicted
        assert verify(work, planned).ok


def test_an_unknown_engine_is_refused_and_auto_means_all() -> None:
    assert [engine.name for engine in engines_named("auto")] == list(ENGINES) == ["eager", "graph"]
    assert isinstance(engines_named("eager")[0], EagerEngine)
    with refused("nonsense", "eager, graph", kind=PlanError):
        engines_named("nonsense")
