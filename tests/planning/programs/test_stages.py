"""Stages of a joint graph: cut where a single value passes, and joined in deep models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowtide import Workload
from lowtide.engines import graph, plan
from lowtide.planning.programs import stages
from lowtide.planning.programs.stages import Stages
from lowtide.profiling import profile
from lowtide.tracing.capture.loss import capture_joint
from tests.engines.planned import assert_verified
from tests.models import Call, layers, squares

from ...engines.counting import Planner, assert_equal, plain_results, results


def test_no_stage_is_made_again_for_nothing(smallest: Planner) -> None:
    (stages,) = smallest.stages
    assert len(stages) > 4
    assert all(stages.backward[:-1])


def test_chains_are_found_across_modules() -> None:
    def odd(model: Any, x: Tensor) -> Tensor:
        """One forward, no blocks: six steps with a skip over two."""
        for _ in range(3):
            y = torch.tanh(x @ model.weight)
            x = torch.tanh(y @ model.weight) + x
        return x

    work = Workload(Call(odd, weight=nn.Parameter(torch.randn(8, 8))), squares, torch.randn(64, 8))
    planner = Planner("sqrt")
    plain = plain_results(work)
    assert_equal(results(work, graph.planned_loss(work, planner)), plain)
    assert planner.programs[0].recomputed


def test_stages_of_a_deep_model_are_joined_and_still_simulate_to_the_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    model = layers(8, 16)
    work = Workload(model, squares, torch.randn(256, 16))
    before = profile(work)
    joint = capture_joint(work)
    assert len(Stages(joint)) > 6
    monkeypatch.setattr(stages, "_MOST", 6)
    joined = Stages(joint)
    assert 3 < len(joined) <= 6
    assert [node for nodes in joined.forward for node in nodes] == joint.forward
    made = plan(work, "60%", profile=before, engine="graph", tune=False)
    assert made.program is not None
    assert_verified(work, made)
