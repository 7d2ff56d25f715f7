"""Costs of a captured graph's ops: as in the plain step, or as when run alone."""

from __future__ import annotations

import statistics

import pytest
import torch
from torch import nn

from lowtide import zoo
from lowtide.engines import apply, plan
from lowtide.planning import predict_plan
from lowtide.planning.programs import program_profile
from lowtide.planning.programs.offloading import HostLink, stalls
from lowtide.planning.programs.program_profile import Forecast
from lowtide.profiling import profile
from lowtide.tracing.capture.loss import capture_joint
from lowtide.workload import Workload
from tests.models import blocks, squares

from ..held import offloading


def test_batch_norms_take_what_the_plain_steps_take_though_a_capture_has_another_name_for_them() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(3)))
    work = Workload(model, squares, torch.randn(2, 8, 16, 16))
    plain = profile(work)
    forecast = Forecast(capture_joint(work), plain)
    norms = [node for node in forecast.joint.forward if "batch_norm" in str(node.target)]
    assert len(norms) == 3
    for node in norms:
        results = tuple(node.meta["val"][0].shape)
        alike = [op for op in plain.graph.ops if "batch_norm." in op.name and op.outputs[0].shape == results]
        assert forecast.seconds(node) == statistics.median_high(op.seconds for op in alike)


def test_ops_that_the_plain_step_has_not_are_run_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Workload(nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.Linear(16, 16)), squares, torch.randn(64, 16))
    timed: list[str] = []
    alone = program_profile.seconds_alone

    def spy(calls: dict[str, program_profile.Call], device: torch.device) -> dict[str, float]:
        timed.extend(calls)
        return dict.fromkeys(alone(calls, device), 1.0)

    monkeypatch.setattr(program_profile, "seconds_alone", spy)
    state = torch.get_rng_state()
    forecast = Forecast(capture_joint(work), profile(work))
    dropouts = [node for node in forecast.joint.nodes.values() if "native_dropout" in str(node.target)]
    assert [forecast.seconds(node) for node in dropouts] == [
        1.0,
        1.0,
    ]  # a plain step on a CPU draws, divides, multiplies
    assert len(timed) == 2
    assert torch.equal(torch.get_rng_state(), state)


def test_a_program_names_the_modules_and_hands_on_what_its_step_does() -> None:
    model = blocks(4, 32, nn.GELU)
    work = Workload(model, squares, torch.randn(256, 32))
    before = profile(work)
    chosen = plan(work, "70%", profile=before, engine="graph", tune=False)
    after = predict_plan(work, chosen, before).after
    assert "stage 1 (0.0" in chosen.explain()
    forward = [op.module for op in after.graph.ops if op.phase == "forward"]
    assert forward == [*(f"{i}.{j}" for i in range(4) for j in range(2)), "", ""]
    made = [s for s in after.graph.storages if s.category == "activation" and s.bytes > 4]
    assert made
    assert all(s.module for s in made)
    assert any(op.module == "3.0" for op in after.graph.ops if op.phase == "backward")
    with apply(chosen, work) as step:
        assert step.profile().saved_bytes == after.saved_bytes > 0


def test_waits_for_copies_are_ops_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    work = zoo.small("lenet")
    joint = capture_joint(work)
    forecast = Forecast(joint, profile(work))
    assert forecast.host is None  # a CPU's memory is the host's
    link = HostLink(bandwidth=1e6, latency=0.0, budget_bytes=2**40)
    monkeypatch.setattr(forecast, "host", link)
    program = offloading(joint)
    ops = [op for op in forecast.graph(program).ops if op.phase != "optimizer"]
    waits = [op.seconds for op in ops if op.name == "lowtide.wait"]
    assert sum(waits) == pytest.approx(sum(stalls(program, forecast.cost, link)))
    assert len(waits) > 0
    runs = sum(forecast.cost(each).seconds for each in (*program.forward, *program.backward))
    assert sum(op.seconds for op in ops) == pytest.approx(runs + sum(waits))
