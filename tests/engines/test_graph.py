"""Programs on the graph engine: the plain step's bits, and the simulator's bytes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
import torch

import lowtide
from lowtide import zoo
from lowtide.engines import graph
from lowtide.planning.programs.program import simulate

from ..soak import SOAK, in_soak
from .counting import PLANS, Planner, executed_peak, results
from .planned import smallest_budget

MODELS = ["lenet", "gpt2", "resnet18", "wrn28-2", "densenet121", "unet", "roberta-base"]
BITS = [*product(["lenet"], ("all", "light", "recursive", "middle")), ("gpt2", "sqrt, light")]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(("name", "way"), list(product(MODELS, PLANS)) if SOAK else BITS)
def test_a_planned_step_gives_the_plain_steps_bits(name: str, way: str) -> None:
    work = zoo.small(name)
    planner = Planner(way)
    planned = graph.planned_loss(work, planner)
    plain = results(work, lambda batch: work.compute_loss(batch=batch))
    for _ in range(2):
        for found, expected in zip(results(work, planned), plain, strict=True):
            assert torch.equal(found, expected)
    assert len(planner.programs) == 1
    assert (planner.programs[0].recomputed > 0) == (way != "all")


@pytest.mark.parametrize("way", ["all", *in_soak(["middle", "smallest"])])
@pytest.mark.parametrize("name", ["lenet", *in_soak(MODELS[1:])])
def test_the_simulated_peak_is_the_executed_one(name: str, way: str) -> None:
    work = zoo.small(name)
    planner = Planner(way)
    peak = executed_peak(work, graph.planned_loss(work, planner))
    assert simulate(planner.programs[0]).peak_bytes == peak


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gpt2", "resnet18", "unet", "roberta-base"])
def test_a_plan_holds_on_the_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    work = zoo.small(name, device="cuda")
    plain = lowtide.profile(work)
    smallest = smallest_budget(work, plain)
    verification = lowtide.verify(work, lowtide.plan(work, smallest, profile=plain, engine="graph"))
    assert verification.ok, str(verification)
    assert verification.storage_peak_bytes == verification.plan.storage_peak_bytes
    if name in ("gpt2", "roberta-base"):
        assert verification.plan.fidelity == "bitwise"
