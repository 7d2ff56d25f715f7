from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from lowtide.engines import plan
from lowtide.errors import PlanError
from lowtide.planning import Plan
from lowtide.profiling import profile
from lowtide.workload import Workload
from tests.refusals import refused

from .steps import chain


@pytest.fixture(scope="module")
def found() -> Plan:
    return plan(chain(), "60%", fake=True, tune=False)


def test_explain_says_what_it_saves_costs_and_why(found: Plan) -> None:
    text = found.explain()
    for part in (
        "budget",
        "plain step",
        "planned step",
        "bitwise",
        " on the model (segments ",
        "saves",
        "longer",
        "Predicted to be the fastest that fits",
    ):
        assert part in text
    assert str(found) == text


def test_a_plan_knows_its_own_step(found: Plan) -> None:
    found.check(chain())


def test_a_plan_of_another_step_is_refused_with_the_reason(found: Plan) -> None:
    work = chain()
    with refused("model", kind=PlanError):
        found.check(chain(depth=5))
    with refused("float32[1024, 16]", "float32[8, 16]", kind=PlanError):
        found.check(replace(work, batch=torch.zeros(8, 16)))
    with refused("SGD(3264 numbers: momentum)", "none", kind=PlanError):
        found.check(replace(work, optimizer=None))
    with refused("SGD(3264 numbers: momentum)", "SGD(3264 numbers)", kind=PlanError):
        found.check(replace(work, optimizer=torch.optim.SGD(work.model.parameters(), lr=0.1)))
    with refused("autocast", kind=PlanError):
        found.check(replace(work, autocast=torch.bfloat16))
    work.model[2].layers[1] = nn.GELU()
    with refused("modules", kind=PlanError):
        found.check(work)


def test_another_learning_rate_is_the_same_step(found: Plan) -> None:
    work = chain()
    work.optimizer.param_groups[0]["lr"] = 0.0
    torch.optim.lr_scheduler.StepLR(work.optimizer, 1)
    found.check(work)


def test_a_plan_for_another_kind_of_device_is_refused(found: Plan) -> None:
    work = chain()
    for device in ("cuda", "h200"):
        with refused(device, "cpu", kind=PlanError):
            replace(found, device=device).check(work)
    replace(found, device="h200").check(work, device="cuda")  # a kind of it


def test_a_profile_of_another_step_is_refused_with_the_reason(found: Plan) -> None:
    work = chain()
    others = {
        "model": chain(depth=5),
        "float32[8, 16]": replace(work, batch=torch.zeros(8, 16)),
        "SGD": replace(work, optimizer=None),
    }
    for reason, other in others.items():
        with refused("profile", reason, kind=PlanError):
            plan(work, "60%", profile=profile(other, fake=True), tune=False)


def test_freezing_a_parameter_makes_another_model() -> None:
    work = Workload(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), lambda m, x: m(x).sum(), torch.zeros(3, 2))
    chosen = plan(work, "100%", fake=True, tune=False)
    work.model[0].weight.requires_grad_(False)
    with refused("model", kind=PlanError):
        chosen.check(work)


def test_times_over_a_second_are_in_seconds(found: Plan) -> None:
    text = replace(found, seconds=1.11).explain()
    assert "1.11 s" in text
    assert "e+03" not in text
