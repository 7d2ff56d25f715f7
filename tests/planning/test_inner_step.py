"""Options inside of microbatches and of lower precision: smaller steps than either alone, and exact peaks."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from lowtide import Workload
from lowtide.engines import apply, plan, verify
from lowtide.errors import BudgetError
from lowtide.planning import Plan
from lowtide.planning.candidate import Permission
from lowtide.planning.combinations import combinations
from lowtide.planning.inner_step import InnerSteps
from lowtide.profiling import Profile, profile
from lowtide.techniques import Fidelity
from lowtide.techniques.technique import Option, Price
from tests.refusals import refused

from ..engines.planned import without_advice
from ..tracing.allocator import allocated_peak


def deep() -> Workload:
    """Blocks whose activations outweigh all else, in a loss that is a mean over samples."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(9)))
    return Workload(model, squares, torch.randn(4, 64, 32), torch.optim.SGD(model.parameters(), 0.1), name="deep")


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


@pytest.fixture(scope="module")
def work() -> Workload:
    return deep()


@pytest.fixture(scope="module")
def plain(work: Workload) -> Profile:
    return profile(work)


@pytest.fixture(scope="module")
def combined(work: Workload, plain: Profile) -> Plan:
    """A plan for a budget that neither microbatches nor any other technique reach alone."""
    for name in ("microbatch", ["sqrt", "optimal", "compress"]):
        with without_advice(), refused("below the smallest plan", kind=BudgetError):
            plan(work, "25%", engine="eager", profile=plain, forbid=name, tune=False)
    return plan(work, "25%", engine="eager", profile=plain, tune=False)


def names(plan: Plan) -> set[str]:
    return {option.technique for option in plan.options}


def test_pieces_with_recomputation_inside_fit_where_neither_does_alone(combined: Plan) -> None:
    assert "microbatch" in names(combined)
    assert names(combined) & {"sqrt", "optimal"}
    assert combined.fidelity is Fidelity.ROUNDOFF
    assert combined.peak_bytes <= combined.budget_bytes


def test_the_predicted_peak_is_the_executed_one(combined: Plan) -> None:
    work = deep()
    checked = verify(work, combined)
    assert checked.ok, str(checked)
    with apply(combined, work) as step:
        assert step.profile().storage_peak_bytes <= combined.storage_peak_bytes
        measured = allocated_peak(work.model, lambda _, x: step._loss(x), work.batch, work.optimizer)
    assert measured <= combined.budget_bytes


def test_each_option_has_its_share_of_what_is_saved(combined: Plan) -> None:
    saved = {choice.option.technique: choice.saved_bytes for choice in combined.choices}
    total = combined.baseline.peak_bytes - combined.peak_bytes
    assert all(size > 0 for size in saved.values())
    assert sum(saved.values()) == pytest.approx(total, rel=0.25)  # pieces do less beside a recomputation


def test_seconds_inside_count_once_for_each_piece(work: Workload, plain: Profile) -> None:
    combination = next(each for each in combinations(plain, Permission.of("changed").permits) if each.inner)
    inner = InnerSteps.of(work, plain).find(combination.options, plain)
    assert inner is not None
    alone = sum(price.seconds for price in inner.prices(combination.options))
    change, *_ = inner.prices(combination.options, Price(Fidelity.BITWISE, compute_seconds=1.0))
    assert change.seconds == pytest.approx(inner.repeats)
    pieces = inner.repeats * inner.profile.graph.loss_seconds
    assert plain.graph.loss_seconds + alone >= pieces  # and what adds gradients


def test_profiling_the_step_inside_changes_nothing(work: Workload, plain: Profile) -> None:
    before = copy.deepcopy(work.model.state_dict())
    lower = [each for each in combinations(plain, Permission.of("changed").permits) if _lowers(each.inner)]
    inner = InnerSteps.of(work, plain).find(lower[0].options, plain)
    assert inner is not None
    assert {s.dtype for s in inner.profile.graph.storages if s.category == "parameter"} == {"bfloat16", "float32"}
    after = work.model.state_dict()
    assert all(
        torch.equal(after[name], tensor) and after[name].dtype == tensor.dtype for name, tensor in before.items()
    )


def test_gradients_that_do_not_stay_are_not_summed_over_pieces(plain: Profile) -> None:
    chosen = [{o.technique for o in each.options} for each in combinations(plain, Permission.of("changed").permits)]
    assert {"microbatch", "precision"} in chosen
    assert not any({"microbatch", "optimizer_in_backward"} <= each for each in chosen)


def _lowers(options: tuple[Option, ...]) -> bool:
    return any(option.technique == "precision" and getattr(option.config, "weights", False) for option in options)
