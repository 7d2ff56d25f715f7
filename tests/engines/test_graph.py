"""Programs on the graph engine: the plain step's bits, and the simulator's bytes."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

import lowtide
from lowtide import zoo
from lowtide.engines import graph
from lowtide.errors import BudgetError
from lowtide.planning.programs.program import simulate

from ..soak import SOAK
from .counting import PLANS, Planner, assert_equal, executed_peak, plain_results, results
from .planned import assert_verified, smallest_budget

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

MODELS = ["lenet", "gpt2", "resnet18", "wrn28-2", "densenet121", "unet", "roberta-base"]
BITS = [*product(["lenet"], ("all", "light", "recursive", "middle")), ("gpt2", "sqrt, light")]


@pytest.mark.parametrize(("name", "way"), list(product(MODELS, PLANS)) if SOAK else BITS)
def test_a_planned_step_gives_the_plain_steps_bits(name: str, way: str) -> None:
    work = zoo.small(name)
    planner = Planner(way)
    planned = graph.planned_loss(work, planner)
    plain = plain_results(work)
    for _ in range(2):
        assert_equal(results(work, planned), plain)
    assert len(planner.programs) == 1
    assert (planner.programs[0].recomputed > 0) == (way != "all")
    assert simulate(planner.programs[0]).peak_bytes == executed_peak(work, planned)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "allow"),
    [("gpt2", "bitwise"), ("roberta-base", "bitwise"), *product(["gpt2", "resnet18", "unet"], ["roundoff"])],
)
def test_a_plan_holds_on_the_gpu(name: str, allow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    work = zoo.small(name, device="cuda")
    plain = lowtide.profile(work)
    smallest = smallest_budget(work, plain, allow=allow)
    chosen = lowtide.plan(work, smallest, profile=plain, engine="graph", allow=allow, compile=False)
    assert_verified(work, chosen)
    assert chosen.fidelity <= allow


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gpt2", "resnet18"])
@pytest.mark.parametrize(
    "ways",
    [
        {"compile": True},
        {"compile": True, "forbid": ["optimizer_in_backward"]},
        {"compile": False, "allow": "approximate"},
        {"compile": False, "allow": ["offload"]},
    ],
    ids=["compiled, any step", "compiled", "codes", "offload"],
)
def test_each_way_to_run_a_program_keeps_its_promise_on_the_gpu(
    name: str, ways: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    work = zoo.small(name, device="cuda", batch=16)
    plain = lowtide.profile(work)
    with pytest.raises(BudgetError) as refused:
        lowtide.plan(work, 1, profile=plain, engine="graph", tune=False, **ways)
    smallest = refused.value.smallest_bytes
    assert smallest
    for budget in (smallest, (smallest + plain.peak_bytes) // 2):
        verification = lowtide.verify(work, lowtide.plan(work, budget, profile=plain, engine="graph", **ways))
        assert verification.ok, str(verification)
