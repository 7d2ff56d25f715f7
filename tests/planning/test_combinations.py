"""Options of the step around programs: smaller steps than either alone, exact peaks, and few combinations."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from lowtide import Workload, zoo
from lowtide.engines import apply, plan, verify
from lowtide.errors import BudgetError, LowtideError, PlanError
from lowtide.optim.in_backward import StepHook
from lowtide.planning import Plan, predict_plan
from lowtide.planning.candidate import Permission
from lowtide.planning.combinations import combinations
from lowtide.profiling import Profile, profile
from lowtide.techniques import Fidelity
from tests.engines.planned import assert_verified, without_advice
from tests.models import blocks, squares
from tests.refusals import refused

from ..tracing.allocator import allocated_peak

NAME = "optimizer_in_backward"


def wide() -> Workload:
    """Layers whose parameters, gradients and states outweigh all else."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(128, 128), nn.Dropout(0.1), nn.GELU()) for _ in range(5)))
    return Workload(model, squares, torch.randn(128, 128), torch.optim.AdamW(model.parameters()), name="wide")


@pytest.fixture(scope="module")
def work() -> Workload:
    return wide()


@pytest.fixture(scope="module")
def plain(work: Workload) -> Profile:
    return profile(work)


@pytest.fixture(scope="module")
def combined(work: Workload, plain: Profile) -> Plan:
    """A plan for a budget that neither programs nor a step in backward reach alone."""
    with without_advice(), refused("below the smallest plan", kind=BudgetError):
        plan(work, "66%", profile=plain, forbid=NAME, tune=False)
    return plan(work, "66%", profile=plain, tune=False)


def test_an_interrupt_while_a_combination_is_applied_leaves_nothing_in_the_model(
    work: Workload, combined: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("lowtide.engines.graph.OtherShapes", interrupted)
        with pytest.raises(KeyboardInterrupt):
            apply(combined, work)
    before = [parameter.detach().clone() for parameter in work.model.parameters()]
    work.compute_loss().backward()
    assert all(map(torch.equal, before, work.model.parameters()))
    assert all(parameter.grad is not None for parameter in work.model.parameters())
    work.model.zero_grad()


def test_a_step_in_backward_and_a_program_fit_where_neither_does_alone(combined: Plan) -> None:
    assert [option.technique for option in combined.options] == [NAME]
    assert combined.program is not None
    assert combined.program.ops_again > 0
    assert combined.fidelity is Fidelity.BITWISE
    assert combined.peak_bytes <= combined.budget_bytes


def test_the_predicted_peak_is_the_executed_one(combined: Plan, work: Workload, plain: Profile) -> None:
    assert predict_plan(work, combined, plain).after.storage_peak_bytes == combined.storage_peak_bytes
    assert_verified(work, combined)
    with apply(combined, work) as step:
        traced = step.profile()
        measured = allocated_peak(work.model, lambda _, x: step._loss(x), work.batch, work.optimizer)
    assert (traced.storage_peak_bytes, traced.peak_bytes) == (combined.storage_peak_bytes, combined.peak_bytes)
    assert measured <= combined.budget_bytes


def test_three_steps_leave_the_parameters_of_the_plain_loop(combined: Plan) -> None:
    work, twin = wide(), wide()
    assert twin.optimizer is not None
    with apply(combined, work) as step:
        torch.manual_seed(3)
        losses = [step(work.batch) for _ in range(3)]
        assert step.measured is not None
        assert step.measured.peak_bytes is not None
        assert step.measured.peak_bytes <= combined.budget_bytes
    torch.manual_seed(3)
    for loss in losses:
        twin.optimizer.zero_grad()
        expected = twin.compute_loss()
        expected.backward()
        twin.optimizer.step()
        assert torch.equal(loss, expected)
    assert all(map(torch.equal, work.model.parameters(), twin.model.parameters()))


def test_a_loop_that_reads_gradients_is_told_what_to_forbid(combined: Plan) -> None:
    work = wide()
    with apply(combined, work) as step:
        with refused("forbid=['optimizer_in_backward']", kind=PlanError):
            step.loss(work.batch)
        with torch.no_grad():
            assert step.loss(work.batch).isfinite()
        step(work.batch)
        with refused("forbid=['optimizer_in_backward'", kind=LowtideError):
            nn.utils.clip_grad_norm_(work.model.parameters(), 1.0)


def test_wrong_gradients_of_a_step_in_backward_are_found(combined: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    def doubled(self: StepHook, parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad *= 2
        step(self, parameter)

    step = StepHook.__call__
    monkeypatch.setattr(StepHook, "__call__", doubled)
    checked = verify(wide(), combined)
    assert not checked.results_agree
    assert [each.what for each in checked.agreements if not each.holds] == ["parameters"]


def test_after_the_undo_the_plain_step_runs(combined: Plan) -> None:
    work = wide()
    before = copy.deepcopy(work.model.state_dict())
    step = apply(combined, work)
    step(work.batch)
    step.undo()
    work.model.load_state_dict(before)
    step.loss(work.batch).backward()
    assert all(parameter.grad is not None for parameter in work.model.parameters())


def test_a_combined_plan_is_written_and_read(combined: Plan) -> None:
    assert Plan.from_json(combined.to_json()) == combined


def test_a_plan_is_explained_by_its_parts_and_says_what_more_would_buy(combined: Plan) -> None:
    (choice,) = combined.choices
    assert combined.program is not None
    assert 0 < choice.saved_bytes < combined.baseline.peak_bytes - combined.peak_bytes
    assert choice.seconds + combined.program.seconds == pytest.approx(combined.seconds - combined.baseline.seconds)
    assert any(note.startswith("A budget of ") for note in combined.notes)


def test_a_larger_budget_is_never_predicted_slower(work: Workload, plain: Profile) -> None:
    seconds: list[float] = []
    for share in (60, 66, 72, 82, 100):
        try:
            with without_advice():
                seconds.append(plan(work, f"{share}%", profile=plain, tune=False).seconds)
        except BudgetError:
            seconds.append(float("inf"))
    assert all(less >= more for less, more in pairwise(seconds))
    assert seconds[-1] == plain.seconds


def test_a_tied_embedding_with_dropout_keeps_its_peak() -> None:
    work = zoo.workload("gpt2", layers=2, width=64, heads=4, vocab=1024, batch=2, seq=16, optimizer="adamw")
    before = profile(work)
    chosen = plan(work, 3_831_428, profile=before, tune=False)
    assert [option.technique for option in chosen.options] == [NAME]
    assert_verified(work, chosen)


# -- which there are -------------------------------------------------------------------------------------


def test_few_combinations_are_permitted_and_none_is_beaten_by_another(plain: Profile) -> None:
    def names(permitted: Permission) -> set[tuple[str, ...]]:
        outer = [each for each in combinations(plain, permitted.permits) if not each.inner]
        return {tuple(o.technique for o in each.options) for each in outer}

    assert names(Permission.of(())) == {(NAME,)}
    assert not names(Permission.of((), forbid=NAME))
    every = names(Permission.of("changed"))
    assert ("optimizer_state", NAME) in every
    assert ("stored_gradients", NAME) not in every  # they conflict
    assert len(every) <= 6


def test_nothing_is_combined_where_gradients_are_little() -> None:
    model = blocks(3, 8, nn.GELU)
    work = Workload(model, squares, torch.randn(4096, 8), torch.optim.AdamW(model.parameters()))
    assert all(each.inner for each in combinations(profile(work, fake=True), Permission.of("changed").permits))


def test_states_of_8_bits_a_step_in_backward_and_a_program_go_together(work: Workload, plain: Profile) -> None:
    pytest.importorskip("torchao")  # without states of 4 bits, another plan is the fastest
    chosen = plan(
        work,
        "70%",
        profile=plain,
        engine="graph",
        allow="changed",
        forbid=["stored_gradients", "compress", "precision", "microbatch"],
        tune=False,
    )
    assert {option.technique for option in chosen.options} == {NAME, "optimizer_state"}
    with apply(chosen, work) as step:
        assert step.profile().storage_peak_bytes == chosen.storage_peak_bytes
