"""Plans on the graph engine, applied: the budget in bytes, plain PyTorch's bits, and files."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch

from lowtide import Workload, zoo
from lowtide.engines import apply, plan
from lowtide.errors import PlanError
from lowtide.planning import Plan
from lowtide.profiling import Profile, profile
from lowtide.techniques import Fidelity
from lowtide.zoo.catalog import ENTRIES
from tests.refusals import refused

from ..contract.outcomes import assert_restored, snapshot
from ..soak import in_soak
from .counting import assert_equal, plain_results, results
from .planned import IN_BACKWARD, Ready, assert_kept, awkward, planned, smallest_budget, verified

QUICK = ["lenet", "gpt2", "lstm"]
REST = [name for name in ENTRIES if name not in QUICK]
MODELS = [*QUICK, *in_soak(REST)]
ENGINES: dict[str, Literal["eager"]] = {"lstm": "eager"}  # which cannot be captured, and is planned as it runs
SIZES: dict[str, dict[str, int]] = {  # at which a step is more than its parameters
    "lenet": {"batch": 64},
    **{name: {"batch": 4, "seq": 64} for name in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")},
    "roberta-base": {"batch": 4, "seq": 64},
}
SHARES = (0.5, 0.35, *in_soak([0.9, 0.7]))


# -- bytes and bits --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_a_plan_keeps_its_budget_to_the_byte_and_plain_pytorchs_bits(name: str) -> None:
    work = zoo.small(name, **SIZES.get(name, {}))
    start = copy.deepcopy(work.model.state_dict())
    before = profile(work)
    expected = plain_results(work)
    done: set[str] = set()
    for budget, chosen in plans_at_shares(work, before, ENGINES.get(name, "graph")):
        assert chosen.fidelity is Fidelity.BITWISE
        assert chosen.peak_bytes <= budget
        key = str(chosen.options) if chosen.program is None else str(chosen.program.instructions)
        if key not in done:
            done.add(key)
            with apply(chosen, work) as step:
                assert_equal(results(work, step.loss), expected)
                assert_kept(step, work, budget)
            work.model.load_state_dict(start)
    if name in ("gpt2", "roberta-base"):
        assert len(done) > 1


def plans_at_shares(work: Workload, before: Profile, engine: Literal["graph", "eager"]) -> Iterator[tuple[int, Plan]]:
    """Bitwise plans at shares of what is above parameters, states and batch; the smallest one instead of none."""
    smallest = smallest_budget(work, before, engine, "bitwise")
    for share in SHARES:
        size = before.static_bytes + int(share * (before.storage_peak_bytes - before.static_bytes))
        budget = max(size, smallest)
        chosen = plan(work, budget, allow="bitwise", profile=before, engine=engine, forbid=IN_BACKWARD, tune=False)
        # Where a convolution's workspace is most of the peak, as LeNet's is on some CPUs, nothing is below plain.
        assert chosen.engine == engine or budget == before.peak_bytes
        yield budget, chosen


def test_under_autocast_with_dropout_a_plan_gives_the_plain_steps_bits() -> None:
    chosen = verified(zoo.small("gpt2", **SIZES["gpt2"], autocast=torch.bfloat16), allow="bitwise").plan
    assert chosen.program is not None
    assert chosen.program.ops_again > 0


# -- plans as files --------------------------------------------------------------------------------------


def test_a_plan_from_a_file_runs_as_the_plan_itself(ready: Ready) -> None:
    work = awkward()
    read = Plan.from_json(json.dumps(ready.step.plan.to_json(), allow_nan=False))
    assert read == ready.step.plan
    expected = plain_results(work)
    step = apply(read, work)
    assert_equal(results(work, step.loss), expected)
    assert step.profile().storage_peak_bytes == read.storage_peak_bytes


def test_a_program_of_another_graph_is_refused_when_it_should_run(ready: Ready) -> None:
    other = plan(awkward(tied=False), "80%", engine="graph", tune=False).program
    assert other is not None
    own = ready.step.plan.program
    assert own is not None  # by whichever lowering ran faster
    wrong = replace(ready.step.plan, program=replace(other, graph=own.graph, lowering=own.lowering))
    step = apply(Plan.from_json(wrong.to_json()), ready.work)
    with refused("program", "graph", kind=PlanError):
        step.loss(ready.work.batch)


# -- undo ------------------------------------------------------------------------------------------------


def test_undo_gives_the_plain_loss_back_and_twice_is_harmless(captures: list[Any]) -> None:
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
    assert not captures
    assert isinstance(value.grad_fn, type(work.compute_loss().grad_fn))
