"""Programs on the graph engine: the plain step's bits, and the simulator's bytes."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from itertools import product

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide import zoo
from lowtide.engines import graph
from lowtide.planning.programs.program import Kind, Program, simulate
from lowtide.tracing.capture.joint import Joint

from ..soak import SOAK, in_soak
from .counting import PLANS, Planner, executed_peak, results
from .planned import smallest_budget

MODELS = ["lenet", "gpt2", "resnet18", "wrn28-2", "densenet121", "unet", "roberta-base"]
BITS = [*product(["lenet"], PLANS), ("gpt2", "smallest"), ("gpt2", "sqrt, light")]


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


def test_a_smaller_budget_runs_more_and_needs_less() -> None:
    programs: list[Program] = []

    def planner(joint: Joint) -> Program:
        programs.extend(Planner(way)(joint) for way in ("all", "middle", "smallest"))
        return programs[0]

    work = zoo.small("lenet")
    graph.planned_loss(work, planner)(work.batch)
    peaks = [simulate(program).peak_bytes for program in programs]
    again = [program.recomputed for program in programs]
    assert peaks[0] > peaks[1] >= peaks[2]
    assert again[0] == 0 < again[1] <= again[2]


def test_gradients_accumulate_and_a_new_shape_is_planned_anew() -> None:
    work = zoo.small("lenet")
    planner = Planner("smallest")
    planned = graph.planned_loss(work, planner)
    images, labels = work.batch
    for loss in (planned, lambda batch: work.compute_loss(batch=batch)):
        work.model.zero_grad()
        for piece in (slice(0, 2), slice(2, 4)):
            loss((images[piece], labels[piece])).backward()
        grads = [p.grad.clone() for p in work.model.parameters() if p.grad is not None]
        if loss is planned:
            ours = grads
    assert all(map(torch.equal, ours, grads))
    planned((images[:3], labels[:3])).backward()
    assert len(planner.programs) == 2


def test_a_program_prints_what_runs_again(smallest: Planner) -> None:
    text = str(smallest.programs[0])
    assert re.search(r"recompute native_dropout\w* \(run \d\) from", text)
    assert "(generator)" in text
    assert "go to backward --" in text
    assert any(i.kind is Kind.FREE for i in smallest.programs[0].backward)


def test_training_goes_as_without_a_plan() -> None:
    work = zoo.small("gpt2")
    start = copy.deepcopy(work.model.state_dict())
    ends: list[list[Tensor]] = []
    for loss in (graph.planned_loss(work, Planner("middle")), lambda batch: work.compute_loss(batch=batch)):
        work.model.load_state_dict(start)
        torch.manual_seed(0)
        optimizer = torch.optim.AdamW(work.model.parameters(), 1e-3)
        for _ in range(4):
            optimizer.zero_grad()
            loss(work.batch).backward()
            nn.utils.clip_grad_norm_(work.model.parameters(), 1.0)
            optimizer.step()
        ends.append([parameter.detach().clone() for parameter in work.model.parameters()])
    assert all(map(torch.equal, *ends))


# -- budgets -------------------------------------------------------------------------------------------


# -- plans ---------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gpt2", "resnet18", "unet", "roberta-base"])
def test_a_plan_holds_on_the_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    work = zoo.small(name, device="cuda")
    plain = lowtide.profile(work)
    smallest = smallest_budget(work, plain)
    found = lowtide.verify(work, lowtide.plan(work, smallest, profile=plain, engine="graph"))
    assert found.ok, str(found)
    assert found.storage_peak_bytes == found.plan.storage_peak_bytes
    if name in ("gpt2", "roberta-base"):
        assert found.plan.fidelity == "bitwise"
