"""Lowerings are known by their registry alone: each is offered with every program, and a plan names its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from lowtide.engines import apply, plan, verify
from lowtide.engines.lowering.ops import OpsLowering
from lowtide.errors import PlanError
from lowtide.planning import Plan, plans
from lowtide.planning.candidate import Permission
from lowtide.planning.lowering import LOWERINGS, Lowered
from lowtide.planning.programs.program import Program
from lowtide.planning.solvers.solver import Problem, Solution
from lowtide.profiling import Profile, profile
from lowtide.techniques.technique import Fidelity, Price
from lowtide.tracing.capture.joint import Joint
from lowtide.workload import Workload

from ..engines.planned import awkward


class ToyLowering(OpsLowering):
    """The ops, counted, and priced as if they took other seconds."""

    def __init__(
        self, name: str = "toy", *, longer: float = -1.0, fidelity: Fidelity | None = None, runs: bool = True
    ) -> None:
        self.name, self.longer, self.fidelity, self.runs = name, longer, fidelity, runs
        self.programs: list[Program] = []

    def can_run(self, joint: Joint, program: Program) -> bool:
        return self.runs

    def price(self, problem: Problem, solution: Solution, fidelity: Fidelity) -> Price:
        return Price(self.fidelity or fidelity, compute_seconds=solution.seconds + self.longer)

    def lower(self, joint: Joint, program: Program) -> Lowered:
        self.programs.append(program)
        return super().lower(joint, program)


class Louder(ToyLowering):
    """The ops with a loss of its own, in plans that ask for compiled code."""

    compiles = True
    note = "The loss is louder."

    def __init__(self, name: str, reference: str) -> None:
        super().__init__(name)
        self.reference = reference

    def is_offered(self, joint: Joint) -> bool:
        return bool(self.reference)

    def lower(self, joint: Joint, program: Program) -> Lowered:
        lowered, loss = super().lower(joint, program), joint.outputs.index(joint.loss)

        def forward(inputs: list[Any]) -> list[Any]:
            results = list(lowered.forward(inputs))
            results[loss] = results[loss] * 1.1
            return results

        return replace(lowered, forward=forward)


@pytest.fixture(scope="module")
def work() -> Workload:
    return awkward()


@pytest.fixture(scope="module")
def plain(work: Workload) -> Profile:
    return profile(work)


def test_a_faster_lowering_is_chosen_and_runs_the_program(work: Workload, plain: Profile) -> None:
    with LOWERINGS.register(lowering := ToyLowering(fidelity=Fidelity.ROUNDOFF)):
        planned = plan(work, "80%", profile=plain, tune=False)
        assert planned.program is not None
        assert (planned.program.lowering, planned.fidelity) == ("toy", Fidelity.ROUNDOFF)
        assert planned.seconds < plain.seconds
        torch.manual_seed(1)
        expected = work.compute_loss()
        with apply(Plan.from_json(planned.to_json()), work) as step:
            torch.manual_seed(1)
            assert torch.equal(step.loss(work.batch), expected)
    assert lowering.programs == [planned.program.instructions]
    with pytest.raises(PlanError) as error:
        apply(planned, work)
    assert "toy" in str(error.value)


@pytest.mark.parametrize(
    "toy",
    [ToyLowering(longer=1.0), ToyLowering(fidelity=Fidelity.CHANGED), ToyLowering(runs=False)],
    ids=["slower", "not allowed", "cannot run"],
)
def test_a_lowering_that_is_no_better_leaves_the_plan_as_it_is(
    toy: ToyLowering, work: Workload, plain: Profile
) -> None:
    for budget in ("80%", "73%"):
        expected = plan(work, budget, profile=plain, engine="graph", tune=False)
        with LOWERINGS.register(toy):
            chosen = plan(work, budget, profile=plain, engine="graph", tune=False)
        noted = [note for note in chosen.notes if "Allowing changed" in note]
        assert replace(chosen, notes=tuple(note for note in chosen.notes if note not in noted)) == expected
        assert bool(noted) == (toy.fidelity is Fidelity.CHANGED)


@pytest.mark.parametrize("reference", ["quiet", "ops"])
def test_a_lowering_that_compiles_is_planned_noted_and_verified_beside_its_reference(
    reference: str, work: Workload, plain: Profile
) -> None:
    with LOWERINGS.register(Louder("loud", reference)), LOWERINGS.register(Louder("quiet", "")):
        planned = plan(work, "80%", profile=plain, engine="graph", compile=True, tune=False)
        assert planned.program is not None
        assert planned.program.lowering == "loud"
        assert planned.notes[-1] == Louder.note
        checked = verify(work, planned)
    assert checked.compared
    assert checked.results_agree is (reference == "quiet")


def test_plans_of_two_lowerings_are_timed_against_each_other(work: Workload, plain: Profile) -> None:
    with LOWERINGS.register(ToyLowering(longer=1e-9)):
        rivals = plans(work, "80%", plain, permitted=Permission(), engine="graph", most=3)
    assert {rival.program and rival.program.lowering for rival in rivals} == {"ops", "toy", "rewritten"}


def test_ops_run_a_program_of_another_graph_that_the_lowering_cannot(work: Workload, plain: Profile) -> None:
    with LOWERINGS.register(lowering := ToyLowering()):
        planned = plan(work, "80%", profile=plain, engine="graph", tune=False)
        lowering.runs = False
        with apply(planned, work) as step:
            step.loss(work.batch).backward()
    assert not lowering.programs
    work.model.zero_grad()
