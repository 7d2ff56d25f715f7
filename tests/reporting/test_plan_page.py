"""Plans and steps have pages too."""

import pytest
import torch
from torch import nn

import lowtide
from lowtide.planning import predict_plan
from lowtide.reporting import report
from lowtide.sizes import format_size


@pytest.fixture(scope="module")
def work():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(9)))
    return lowtide.Workload(model, lambda model, x: model(x).square().mean(), torch.randn(256, 64))


def test_a_plan_page_gives_the_budget_and_the_choice(work, tmp_path):
    plan = lowtide.plan(work, "80%", engine="eager")
    text = report(plan, tmp_path / "made" / "plan.html").read_text()
    assert format_size(plan.budget_bytes) in text
    assert format_size(plan.peak_bytes) in text
    assert str(plan.choices[0].option) in text


def test_a_plan_page_of_the_graph_engine_names_the_program(work, tmp_path):
    plan = lowtide.plan(work, "80%", engine="graph")
    text = report(plan, tmp_path / "plan.html").read_text()
    assert str(plan.program) in text
    assert "nothing is changed" not in text


def test_a_step_page_shows_the_planned_step(work, tmp_path):
    step = lowtide.apply(lowtide.plan(work, "80%"), work)
    text = report(step, tmp_path / "step.html").read_text()
    step.undo()
    assert f"planned for {format_size(step.plan.budget_bytes)}" in text


@pytest.fixture(scope="module")
def graph_plan(work):
    before = lowtide.profile(work)
    return predict_plan(work, lowtide.plan(work, "70%", profile=before, engine="graph"), before)


def test_a_prediction_is_the_plans_and_the_step_keeps_it(work, graph_plan):
    plan = graph_plan.plan
    assert (graph_plan.after.peak_bytes, graph_plan.after.storage_peak_bytes) == (
        plan.peak_bytes,
        plan.storage_peak_bytes,
    )
    with lowtide.apply(plan, work) as step:
        assert step.profile().storage_peak_bytes == graph_plan.after.storage_peak_bytes
    assert 0 < graph_plan.after.saved_bytes < graph_plan.before.saved_bytes
    again = [choice for _, choice in graph_plan.stages if not choice.kept]
    assert again
    assert sum(choice.seconds_again for choice in again) == pytest.approx(plan.program.seconds)


def test_a_prediction_page_shows_the_program_and_says_why(graph_plan, tmp_path):
    text = report(graph_plan, tmp_path / "plan.html").read_text()
    assert "graph engine" in text
    assert '<svg class="figure"' in text
    assert text.count("<code>") >= len(graph_plan.stages)
    made_again = sum(not choice.kept for _, choice in graph_plan.stages)
    assert text.count("</i>made again") == made_again > 0
    assert "What modules keep" not in text  # a captured graph has no modules


def test_a_prediction_of_an_eager_plan_compares_modules(work, tmp_path):
    before = lowtide.profile(work)
    found = predict_plan(work, lowtide.plan(work, "80%", profile=before, engine="eager"), before)
    assert found.program is None
    assert found.after.peak_bytes == found.plan.peak_bytes
    text = report(found, tmp_path / "plan.html").read_text()
    assert str(found.plan.choices[0].option) in text
    assert "What modules keep" in text
    assert "The program" not in text


def test_a_plan_of_another_graph_is_refused(work, graph_plan):
    other = lowtide.Workload(work.model, lambda model, x: model(x).abs().mean(), work.batch)
    with pytest.raises(lowtide.LowtideError, match="another graph"):
        predict_plan(other, graph_plan.plan, lowtide.profile(other))
