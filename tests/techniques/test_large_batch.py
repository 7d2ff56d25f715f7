"""The large-batch kit as a technique: the contract, asked for by name, and never a plan's own choice."""

from dataclasses import replace

import pytest
import torch

import lowtide
from lowtide.errors import BudgetError, LowtideError, PlanError
from lowtide.planning.prediction import apply_options, estimate_peak
from lowtide.planning.search import Search
from lowtide.profiling import profile
from lowtide.techniques import Fidelity, Option, techniques
from tests.contract.contract import StepContract
from tests.contract.outcomes import run
from tests.contract.workloads import WORKLOADS, seeded, wide

NAME = "large_batch"


def option(**knobs):
    return Option(NAME, ("",), tuple(knobs.items()))


class TestContract(StepContract):
    name = NAME


def test_a_step_by_name_is_one_at_the_scaled_rate():
    work, twin = seeded(wide)(), seeded(wide)()
    twin.optimizer.param_groups[0]["lr"] *= 4
    expected = run(twin, steps=3)
    with apply_options(work, [option(factor=16, warmup_steps=0, rule="sqrt")]) as applied:
        found = run(applied.work, steps=3)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], value) for key, value in expected.items())
    assert work.optimizer.param_groups[0]["lr"] == 1e-2


def test_the_rate_is_warmed_up_over_the_steps():
    work = WORKLOADS["mlp"]()
    work = replace(work, optimizer=torch.optim.SGD(work.model.parameters(), lr=0.1))
    weight = next(iter(work.model.parameters()))
    moved = []
    with apply_options(work, [option(factor=5, warmup_steps=4)]):
        for _ in range(6):
            before = weight.detach().clone()
            weight.grad = torch.ones_like(weight)
            work.optimizer.step()
            moved.append(float((before - weight).mean().detach()))
    assert moved == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.5], rel=1e-4)


@pytest.mark.parametrize("name", [*WORKLOADS, "wide"])
def test_no_plan_chooses_it_for_memory(name):
    work = WORKLOADS.get(name, seeded(wide))()
    plain = profile(work)
    technique = techniques()[NAME]
    search = Search(work, plain, "eager", plain.peak_bytes)
    order = [candidate.technique for candidate in search.candidates if candidate.technique in ("", NAME)]
    assert order == ["", NAME, NAME]  # where all fit, the plain step is first
    for each in search.candidates:
        if each.technique == NAME:
            assert technique.price(each.option, plain).removed == ()
            assert each.estimate == estimate_peak(plain.graph, []) == plain.peak_bytes
            assert search.exact(each).peak_bytes >= plain.peak_bytes  # where the plain step does not fit, nor does this
            assert search.exact(each).storage_peak_bytes == plain.storage_peak_bytes


def test_a_budget_that_only_it_could_meet_is_met_by_nothing():
    work = seeded(wide)()
    plain = profile(work)
    assert lowtide.plan(work, plain.peak_bytes, allow=NAME, profile=plain).options == ()
    with pytest.raises(BudgetError):
        lowtide.plan(work, plain.peak_bytes - 1, allow=NAME, profile=plain, engine="eager")


@pytest.mark.parametrize("name", [*WORKLOADS, "wide"])
def test_the_rule_offered_is_the_optimizers(name):
    plain = profile(WORKLOADS.get(name, seeded(wide))())
    rules = {each.knob("rule") for each in techniques()[NAME].options(plain)}
    assert rules == {"sqrt" if name == "wide" else "linear"}
    assert techniques()[NAME].check(option()).fidelity is Fidelity.CHANGED


@pytest.mark.parametrize(
    "knobs", [{"factor": "4"}, {"warmup_steps": 1.5}, {"rule": "cubic"}, {"factor": -1}, {"bound": True}]
)
def test_a_knob_that_cannot_be_is_refused_and_changes_nothing(knobs):
    work = seeded(wide)()
    with pytest.raises(LowtideError):
        techniques()[NAME].apply(work, [option(**{"factor": 4, **knobs})])
    assert not work.optimizer._optimizer_step_pre_hooks


def test_steps_in_backward_are_refused_in_either_order():
    work = seeded(wide)()
    both = [option(factor=4), Option("optimizer_in_backward", ("",))]
    for options in (both, both[::-1]):
        with pytest.raises(PlanError, match="cannot be in one plan"):
            apply_options(work, options)


@pytest.mark.parametrize("momentum", [True, False], ids=["SGD", "AdamW"])
def test_a_bound_is_asked_for_by_name_and_predicted(momentum):
    pytest.importorskip("bitsandbytes")
    work = (WORKLOADS["mlp"] if momentum else seeded(wide))()
    kind = type(work.optimizer)
    plain = profile(work)
    bounded = option(factor=4, warmup_steps=2, bound=0.1)
    predicted = lowtide.planning.predict(work, [bounded], plain)
    with apply_options(work, [bounded, Option("optimizer_state", ("",), (("state", "8bit"),))]) as applied:
        run(applied.work, steps=2)
    with apply_options(work, [bounded]) as applied:
        assert profile(applied.work).storage_peak_bytes == predicted.storage_peak_bytes
        run(applied.work, steps=2)
    assert type(work.optimizer) is kind
