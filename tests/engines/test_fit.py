"""``fit``: plan, verify and apply in one call; a broken promise is corrected, replaced or refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.engines import Step, apply, fit
from lowtide.engines.graph import PlannedLoss
from lowtide.errors import PlanError
from lowtide.planning.graph_candidates import GraphCandidates
from lowtide.planning.solvers.chain import ChainSolver
from lowtide.techniques import Fidelity, register
from lowtide.tracing.capture import loss as captured_loss
from tests.models import layers, squares
from tests.refusals import refused, warned

from ..contract.outcomes import assert_restored, snapshot
from ..planning.steps import chain
from .counting import count_calls
from .test_verify import Off, divided


def test_fit_plans_verifies_and_applies() -> None:
    work = chain()
    step = fit(work.model, work.loss, work.batch, work.optimizer, budget="60%")
    assert step.plan.choices or step.plan.program
    assert torch.isfinite(step(work.batch))
    step.undo()


def test_fit_refuses_a_plan_that_does_not_keep_its_promise(
    monkeypatch: pytest.MonkeyPatch, only: Callable[..., None]
) -> None:
    only()
    work = chain()
    before = snapshot(work.model)
    with register(Off(Fidelity.BITWISE)) as registered:
        monkeypatch.setattr("lowtide.engines.eager.predict", lambda w, o, b, **_: replace(b, graph=tiny(b.graph)))
        with refused("promised", kind=PlanError):
            fit(work.model, work.loss, work.batch, work.optimizer, budget="60%")
    registered()
    assert_restored(work.model, before)


def tiny(graph: Any) -> Any:
    """A prediction of next to nothing, so that the planner falls for it."""
    return replace(graph, storages=graph.storages[:1])


def test_fit_corrects_the_class_of_a_plan_that_is_off_by_rounding_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    work = divided()
    monkeypatch.setattr(GraphCandidates, "fidelity", Fidelity.BITWISE)
    with warned("roundoff", "allow='bitwise'"):
        step = fit(work.model, work.loss, work.batch, budget="99%", engine="graph", tune=False)
    assert step.plan.fidelity is Fidelity.ROUNDOFF
    assert "off by rounding" in step.plan.notes[-1]
    step.undo()
    with refused("bitwise", "rounding", kind=PlanError):
        fit(work.model, work.loss, work.batch, budget="99%", engine="graph", allow="bitwise", tune=False)


def test_fit_falls_back_to_the_eager_engine_where_a_graph_breaks_its_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    work = chain()
    monkeypatch.setattr(PlannedLoss, "__call__", lambda self, model, x: 1.1 * self.work.compute_loss(batch=x))
    solve = ChainSolver.solve  # said to be the fastest, so that auto takes it
    monkeypatch.setattr(ChainSolver, "solve", lambda *given: [replace(each, seconds=-1.0) for each in solve(*given)])
    with warned("eager engine"):
        step = fit(work.model, work.loss, work.batch, budget="60%")
    assert step.plan.engine == "eager"
    step.undo()


def test_fit_captures_the_loss_once_and_half_the_batch_for_a_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = count_calls(monkeypatch, captured_loss, "traced_inputs")  # once for each graph of Dynamo's

    def fitted(engine: str, budget: str) -> Step:
        graphs.clear()
        given = torch.randn(64, 32)
        step = lowtide.fit(layers(4, 32, nn.GELU), squares, given, engine=engine, budget=budget)
        step.loss(torch.randn(64, 32)).backward()
        return step

    fitted("auto", "50%").undo()
    assert len(graphs) == 2
    step = fitted("graph", "80%")
    assert len(graphs) == 1
    step.undo()
    step._plain.model.zero_grad()
    with apply(step.plan, step._plain) as again:  # another call, before which anything may have changed
        again.loss(torch.randn(64, 32)).backward()
    assert len(graphs) == 2
