"""The ``rewritten`` lowering: rewrites op by op, the plain step's generator, bytes as predicted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import lowtide
from lowtide import Workload
from lowtide.engines import graph
from lowtide.engines.lowering.ops import OpsLowering
from lowtide.engines.lowering.rewritten import RewrittenLowering
from lowtide.planning.graph_candidates import GraphCandidates, graph_candidates
from lowtide.planning.lowering import LOWERINGS
from lowtide.planning.plan import Plan
from lowtide.planning.programs.program import simulate
from lowtide.profiling import profile
from lowtide.techniques.rewrites import chunked_loss
from lowtide.techniques.technique import Fidelity
from lowtide.tracing.capture.joint import Joint
from lowtide.tracing.capture.loss import sharing_captures
from lowtide.tracing.snapshot import unchanged
from tests.models import squares
from tests.soak import count

from ..counting import assert_equal, executed_peak, plain_results, results
from ..lowered import convolutions, language_model
from ..planned import assert_verified


def with_dropout() -> Workload:
    torch.manual_seed(0)
    blocks = (nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.3))
    model = nn.Sequential(*blocks, *(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.SiLU(), nn.Dropout2d(0.5)))
    return Workload(model, squares, torch.randn(8, 4, 16, 16))


WORKS: dict[str, Callable[[], Workload]] = {
    "convolutions": lambda: convolutions(blocks=count(2, soak=4)),
    "dropout": with_dropout,
    "GPT-2": lambda: language_model(dropout=0.2, layers=1),
}


@pytest.fixture(autouse=True)
def small_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_loss, "_LEAST_BYTES", 1)


@pytest.mark.parametrize("name", WORKS)
def test_each_program_gives_the_plain_steps_results_at_its_simulated_peak(name: str) -> None:
    work = WORKS[name]()
    expected = plain_results(work)
    with sharing_captures(work):
        candidates = graph_candidates(work, profile(work))
        offers = [each for each in candidates.offers("graph", compile=False) if each.lowering == "rewritten"]
        smallest = min(offers, key=lambda each: each.estimate)
        for offer in (offers[0], offers[len(offers) // 2], smallest):
            program = offer.change.program  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]
            loss = graph.PlannedLoss(work, lambda _, p=program: lambda joint: p, lowering=RewrittenLowering())
            actual = results(work, lambda batch, loss=loss: loss(work.model, batch))
            torch.testing.assert_close(actual, expected)
            assert torch.equal(actual[-1], expected[-1])  # the generator
            with unchanged(work):
                peak = executed_peak(work, lambda batch, loss=loss: loss(work.model, batch))
            assert peak == simulate(program).peak_bytes


def test_counters_of_batches_are_exact() -> None:
    work = with_dropout()
    step = lowtide.apply(rewritten_plan(work, 1.0), work)
    for batches in (1, 2):
        step.loss(work.batch).backward()
        counters = [each for name, each in step.model.named_buffers() if name.endswith("num_batches_tracked")]
        assert [each.item() for each in counters] == [batches] * 2
    step.undo()


def test_a_step_with_rewrites_is_verified_and_undone() -> None:
    work = convolutions()
    plan = rewritten_plan(work)
    assert plan.program is not None
    assert plan.program.lowering == "rewritten"
    assert plan.fidelity is Fidelity.ROUNDOFF
    assert "batchnorm in 6 places" in plan.explain()
    read = Plan.from_json(plan.to_json())
    assert_verified(work, read)
    before = plain_results(work)
    lowtide.apply(read, work).undo()
    after = plain_results(work)
    assert_equal(before, after)


def rewritten_plan(work: Workload, share: float = 0.8) -> Plan:
    """The plan of the lowering for a share of the plain step's peak."""
    before = profile(work)
    candidates = graph_candidates(work, before)
    others = candidates.offers("graph", compile=False)
    wanted = [each for each in others if each.lowering == "rewritten"]
    budget = int(share * before.peak_bytes) - 1  # or the plain step would fit
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GraphCandidates, "offers", lambda *_, **__: wanted)
        return lowtide.plan(work, budget, profile=before, engine="graph", tune=False)


def test_bytes_inside_of_rewrites_are_predicted() -> None:
    """The chunk of logits is no storage of the graph, and the largest tensor of this step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(2000, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2000))
    ids = torch.randint(2000, (400,))
    work = Workload(model, lambda m, x: nn.functional.cross_entropy(m(x), x), ids)
    plan = rewritten_plan(work)
    assert plan.program is not None
    assert plan.peak_bytes > plan.storage_peak_bytes + 2**20
    verification = lowtide.verify(work, plan)
    assert verification.ok
    assert verification.peak_bytes == pytest.approx(plan.peak_bytes, rel=0.01)


# -- what is offered -------------------------------------------------------------------------------------


def test_a_graph_without_patterns_is_offered_once() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    work = Workload(model, squares, torch.randn(4, 8))
    candidates = graph_candidates(work, profile(work))
    assert RewrittenLowering().form(candidates.joint) is candidates.joint
    assert {each.lowering for each in candidates.offers("graph", compile=False)} == {"ops"}


@pytest.fixture(scope="module")
def candidates() -> GraphCandidates:
    work = convolutions(blocks=1, depth=2)
    return graph_candidates(work, profile(work))


def test_the_plain_ops_are_offered_beside_rewrites(candidates: GraphCandidates) -> None:
    offers = candidates.offers("graph", compile=False)
    fidelities = {each.lowering: each.price.fidelity for each in offers}
    assert fidelities == {"ops": Fidelity.BITWISE, "rewritten": Fidelity.ROUNDOFF}


def test_only_bitwise_plans_where_only_those_are_allowed() -> None:
    work = convolutions()
    plan = lowtide.plan(work, "80%", allow="bitwise", engine="graph", tune=False)
    assert plan.program is not None
    assert plan.program.lowering == "ops"


def test_rewrites_are_priced_at_the_seconds_that_they_take_longer(candidates: GraphCandidates) -> None:
    lowering = LOWERINGS["rewritten"]
    form = candidates.form(lowering)
    assert form.problem.joint is not candidates.joint
    for saved, longer in ((5.0, 0.0), (-5.0, 5.0)):
        problem = type(form.problem)(form.problem.joint, form.problem.seconds, saved_seconds=saved)
        for solution in (form.solutions()[0], form.solutions()[-1]):
            assert lowering.price(problem, solution, Fidelity.BITWISE).seconds == solution.seconds + longer


def test_the_form_is_rewritten_once_and_names_its_rewrites() -> None:
    work = language_model(layers=1)
    joint = graph_candidates(work, profile(work)).joint
    form = RewrittenLowering().form(joint)
    assert isinstance(form, Joint)
    assert form.rewrites == {"chunked_loss": 1}
    assert RewrittenLowering().form(joint) is form
    assert OpsLowering().form(joint) is joint
