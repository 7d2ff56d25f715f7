"""Plans and steps have pages too."""

import pytest
import torch
from torch import nn

import lowtide
from lowtide.reporting import report
from lowtide.sizes import format_size


@pytest.fixture(scope="module")
def work():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(9)))
    return lowtide.Workload(model, lambda model, x: model(x).square().mean(), torch.randn(256, 64))


def test_a_plan_page_gives_the_budget_and_the_choice(work, tmp_path):
    plan = lowtide.plan(work, "80%")
    text = report(plan, tmp_path / "made" / "plan.html").read_text()
    assert format_size(plan.budget_bytes) in text
    assert format_size(plan.peak_bytes) in text
    assert str(plan.choices[0].option) in text


def test_a_step_page_shows_the_planned_step(work, tmp_path):
    step = lowtide.apply(lowtide.plan(work, "80%"), work)
    text = report(step, tmp_path / "step.html").read_text()
    step.undo()
    assert f"planned for {format_size(step.plan.budget_bytes)}" in text
