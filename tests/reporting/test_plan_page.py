"""Plans, predictions and steps have pages too."""

import pytest
import torch

import lowtide
from lowtide.planning import predict_plan
from lowtide.reporting import report
from lowtide.sizes import format_size
from tests.models import blocks, squares
from tests.refusals import refused


@pytest.fixture(scope="module")
def work():
    model = blocks(4, 64)
    return lowtide.Workload(model, squares, torch.randn(256, 64))


@pytest.fixture(scope="module")
def before(work):
    return lowtide.profile(work)


@pytest.fixture(scope="module")
def predictions(work, before):
    """The same budget on both engines."""
    plans = {e: lowtide.plan(work, "80%", profile=before, engine=e, tune=False) for e in ("eager", "graph")}
    return {engine: predict_plan(work, plan, before) for engine, plan in plans.items()}


@pytest.mark.parametrize("engine", ["eager", "graph"])
def test_a_plan_page_gives_the_budget_and_the_change(predictions, engine, tmp_path):
    plan = predictions[engine].plan
    text = report(plan, tmp_path / "new" / "plan.html").read_text()
    change = plan.choices[0].option if engine == "eager" else plan.program
    assert all(part in text for part in (format_size(plan.budget_bytes), format_size(plan.peak_bytes), str(change)))


def test_a_step_page_shows_the_planned_step_as_predicted(work, predictions, tmp_path):
    prediction = predictions["graph"]
    plan, after = prediction.plan, prediction.after
    assert (after.peak_bytes, after.storage_peak_bytes) == (plan.peak_bytes, plan.storage_peak_bytes)
    with lowtide.apply(plan, work) as step:
        assert step.profile().storage_peak_bytes == after.storage_peak_bytes
        assert f"planned for {format_size(plan.budget_bytes)}" in report(step, tmp_path / "step.html").read_text()


def test_a_prediction_says_which_stages_are_recomputed(predictions, tmp_path):
    prediction = predictions["graph"]
    assert 0 < prediction.after.saved_bytes < prediction.before.saved_bytes
    recomputed = [choice for _, choice in prediction.stages if not choice.kept]
    assert sum(choice.seconds_again for choice in recomputed) == pytest.approx(prediction.plan.program.seconds)
    text = report(prediction, tmp_path / "plan.html").read_text()
    assert "graph engine" in text
    assert '<svg class="figure"' in text
    assert text.count("</i>recomputed") == len(recomputed) > 0
    assert "by module" not in text  # a captured graph has no modules


def test_a_prediction_of_an_eager_plan_compares_modules(predictions, tmp_path):
    prediction = predictions["eager"]
    assert prediction.program is None
    assert prediction.after.peak_bytes == prediction.plan.peak_bytes
    text = report(prediction, tmp_path / "plan.html").read_text()
    assert str(prediction.plan.choices[0].option) in text
    assert "by module" in text
    assert '<svg class="figure"' not in text


def test_a_plan_of_another_graph_is_refused(work, predictions):
    other = lowtide.Workload(work.model, lambda model, x: model(x).abs().mean(), work.batch)
    with refused("another graph"):
        predict_plan(other, predictions["graph"].plan, lowtide.profile(other))
