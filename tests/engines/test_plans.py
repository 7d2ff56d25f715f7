"""Plans on the graph engine, applied: the budget in bytes, plain PyTorch's bits, files, other shapes and two ranks."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lowtide import Workload, zoo
from lowtide.engines import Step, apply, graph, plan, verify
from lowtide.errors import BudgetError, PlanError
from lowtide.planning import Plan
from lowtide.profiling import Profile, profile
from lowtide.techniques import Fidelity
from lowtide.zoo.catalog import ENTRIES

from ..contract.outcomes import assert_restored, snapshot
from ..planning.steps import chain
from ..ranks import on_two_ranks
from ..soak import in_soak
from ..tracing.allocator import allocated_peak
from .counting import count_calls, results
from .planned import Loss, Ready, assert_kept, awkward, plain_loss, planned, smallest_budget, squares

QUICK = ["lenet", "gpt2", "lstm"]
REST = [name for name in ENTRIES if name not in QUICK]
MODELS = [*QUICK, *in_soak(REST)]
ENGINES: dict[str, Literal["eager"]] = {"lstm": "eager"}  # which cannot be captured, and is planned as it runs
SIZES: dict[str, dict[str, int]] = {  # at which a step is more than its parameters
    "lenet": {"batch": 64},
    **{name: {"batch": 4, "seq": 64} for name in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")},
    "roberta-base": {"batch": 4, "seq": 64},
}
SHARES = (0.9, 0.5, 0.35, *in_soak([0.7]))


# -- bytes and bits --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_a_plan_keeps_its_budget_to_the_byte_and_plain_pytorchs_bits(name: str) -> None:
    work = zoo.small(name, **SIZES.get(name, {}))
    start = copy.deepcopy(work.model.state_dict())
    before = profile(work)
    expected = results(work, plain_loss(work))
    done: set[str] = set()
    for budget, found in plans_at_shares(work, before, ENGINES.get(name, "graph")):
        assert found.fidelity is Fidelity.BITWISE
        assert found.peak_bytes <= budget
        chosen = str(found.options) if found.program is None else str(found.program.instructions)
        if chosen not in done:
            done.add(chosen)
            with apply(found, work) as step:
                for ours, plains in zip(results(work, step.loss), expected, strict=True):
                    assert torch.equal(ours, plains)
                assert_kept(step, work, budget)
            work.model.load_state_dict(start)
    if name in ("gpt2", "roberta-base"):
        assert len(done) > 2


def test_what_is_not_captured_is_planned_as_it_runs() -> None:
    work = zoo.small("lstm")
    with pytest.raises(PlanError, match="not captured as one graph"):
        plan(work, "90%", engine="graph", tune=False)
    try:
        found = plan(work, 1, tune=False)
    except BudgetError as error:
        found = plan(work, int(str(error).split(", ")[1].split()[0]), tune=False)
    assert found.engine == "eager"
    assert verify(work, found).ok


def plans_at_shares(work: Workload, before: Profile, engine: Literal["graph", "eager"]) -> Iterator[tuple[int, Plan]]:
    """Plans at shares of what is above parameters, optimizer state and batch; the smallest one instead of none."""
    smallest = smallest_budget(work, before, engine)
    for share in SHARES:
        size = before.static_bytes + int(share * (before.storage_peak_bytes - before.static_bytes))
        budget = max(size, smallest)
        found = plan(work, budget, profile=before, engine=engine, tune=False)
        # Where a convolution's workspace is most of the peak, as LeNet's is on some CPUs, nothing is below plain.
        assert found.engine == engine or budget == before.peak_bytes
        yield budget, found


def test_under_autocast_with_dropout_a_plan_gives_the_plain_steps_bits() -> None:
    work = zoo.small("gpt2", **SIZES["gpt2"], autocast=torch.bfloat16)
    before = profile(work)
    found = plan(work, smallest_budget(work, before), profile=before, engine="graph", tune=False)
    assert found.program is not None
    assert found.program.ops_again > 0
    assert found.fidelity is Fidelity.BITWISE
    with apply(found, work) as step:
        ours = results(work, step.loss)
        assert step.profile().storage_peak_bytes == found.storage_peak_bytes
    assert all(map(torch.equal, ours, results(work, plain_loss(work))))


# -- plans as files --------------------------------------------------------------------------------------


def test_a_plan_from_a_file_runs_as_the_plan_itself(ready: Ready) -> None:
    work = awkward()
    read = Plan.from_json(json.dumps(ready.step.plan.to_json(), allow_nan=False))
    assert read == ready.step.plan
    expected = results(work, plain_loss(work))
    step = apply(read, work)
    for ours, plains in zip(results(work, step.loss), expected, strict=True):
        assert torch.equal(ours, plains)
    assert step.profile().storage_peak_bytes == read.storage_peak_bytes


def test_a_plan_of_another_step_patches_nothing(ready: Ready) -> None:
    work = awkward()
    before = snapshot(work.model)
    frozen = awkward()
    frozen.model[2].mix.requires_grad_(False)
    others = {
        "another model": awkward(tied=False),
        "another batch": replace(work, batch=work.batch[:8]),
        "another optimizer": replace(work, optimizer=torch.optim.Adam(work.model.parameters())),
        "another autocast": replace(work, autocast=torch.bfloat16),
    }
    for reason, other in (*others.items(), ("another model", frozen)):
        with pytest.raises(PlanError, match=reason):
            apply(ready.step.plan, other)
    assert_restored(work.model, before)


def test_a_program_of_another_graph_is_refused_when_it_should_run(ready: Ready) -> None:
    other = plan(awkward(tied=False), "80%", engine="graph", tune=False).program
    assert other is not None
    assert ready.step.plan.program is not None
    wrong = replace(ready.step.plan, program=replace(other, graph=ready.step.plan.program.graph))
    step = apply(Plan.from_json(wrong.to_json()), ready.work)
    with pytest.raises(PlanError, match="not of this step"):
        step.loss(ready.work.batch)


# -- other shapes ----------------------------------------------------------------------------------------


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Grows with each graph that is compiled."""
    return count_calls(monkeypatch, graph._Backend, "__call__")


@pytest.mark.filterwarnings("ignore:Gradients of .* exist before the step")  # of the step before; not asked here
def test_another_shape_is_captured_once_at_most_and_keeps_the_bits(ready: Ready, compiled: list[Any]) -> None:
    def loop(loss: Loss, model: nn.Module) -> list[Tensor]:
        found = []
        for size in (17, 64, 65, 17):
            value = loss(ready.batches(1)[0].repeat(2, 1)[:size])
            value.backward()
            found.append(value.detach())
        return found

    ready.step.loss(ready.work.batch)
    compiled.clear()
    ready.compare(loop)
    assert len(compiled) == 1  # for 65; the plain step fits with 17
    ready.compare(loop)
    assert len(compiled) == 1


def test_a_batch_that_does_not_fit_is_warned_about_and_runs(ready: Ready) -> None:
    large = torch.randn(96, 16)
    tight = planned_tightly(ready.work)
    with pytest.warns(RuntimeWarning) as warned:
        value = tight.loss(large)
    assert len(warned) == 1
    said = str(warned[0].message)
    assert "float32[96, 16] does not fit the budget" in said
    assert "planned for float32[64, 16]" in said
    value.backward()
    ready.work.model.zero_grad()
    ready.work.model.load_state_dict(ready.start)


def planned_tightly(work: Workload) -> Step:
    before = profile(work)
    return apply(plan(work, smallest_budget(work, before), profile=before, engine="graph", tune=False), work)


def test_a_larger_batch_is_within_the_budget_or_warned_about() -> None:
    work, larger = (zoo.small("lenet", batch=batch) for batch in (64, 66))
    step = planned_tightly(work)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        found = allocated_peak(work.model, lambda _, batch: step.loss(batch), larger.batch, work.optimizer)
    assert found <= step.plan.budget_bytes or warned


# -- undo ------------------------------------------------------------------------------------------------


def test_undo_gives_the_plain_loss_back_and_twice_is_harmless(compiled: list[Any]) -> None:
    work = awkward()
    before = snapshot(work.model)
    kind, keys, optimizer = type(work.model), list(work.model.state_dict()), work.optimizer
    step = planned(work).step
    assert (type(step.model), list(step.model.state_dict())) == (kind, keys)
    assert step.model is work.model
    for _ in range(2):
        step.undo()
        assert step.work is work
        assert work.optimizer is optimizer
    assert_restored(work.model, before)
    value = step.loss(work.batch)
    assert not compiled
    assert isinstance(value.grad_fn, type(work.compute_loss().grad_fn))


# -- on two ranks ----------------------------------------------------------------------------------------


class PlannedModule(nn.Module):
    """What DDP wraps: its forward is the planned loss."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.model, self.step = step.model, step

    def forward(self, batch: Tensor) -> Tensor:
        return self.step.loss(batch)


def ddp_around_the_planned_loss_is_ddp_around_the_plain_one(rank: int) -> None:
    work = chain(2)
    plain = DistributedDataParallel(copy.deepcopy(work.model), bucket_cap_mb=1e-3)
    wrapped = DistributedDataParallel(PlannedModule(planned(work).step), bucket_cap_mb=1e-3)
    torch.manual_seed(rank)
    for _ in range(3):
        batch = torch.randn_like(work.batch)
        squares(plain, batch).backward()
        wrapped(batch).backward()
        for ours, theirs in zip(wrapped.parameters(), plain.parameters(), strict=True):
            assert ours.grad is not None
            assert torch.equal(ours.grad, theirs.grad)


def a_ddp_model_is_not_captured_and_that_is_said(rank: int) -> None:
    work = chain(2)
    inside = Workload(DistributedDataParallel(work.model), squares, work.batch)
    with pytest.raises(PlanError, match="not captured as one graph"):
        plan(inside, "70%", engine="graph", tune=False)


test_on_two_ranks = on_two_ranks(
    ddp_around_the_planned_loss_is_ddp_around_the_plain_one,
    a_ddp_model_is_not_captured_and_that_is_said,
)
