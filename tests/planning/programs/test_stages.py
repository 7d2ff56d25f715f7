"""Stages of a joint graph: cut where a single value passes, and joined in deep models."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lowtide import Workload
from lowtide.engines import graph, plan, verify
from lowtide.planning.programs import stages
from lowtide.planning.programs.stages import Stages
from lowtide.profiling import profile
from lowtide.tracing.capture.loss import capture_joint

from ...engines.counting import Planner, results
from ...engines.planned import squares


def test_no_stage_is_made_again_for_nothing(smallest: Planner) -> None:
    (stages,) = smallest.stages
    assert len(stages) > 4
    assert all(stages.backward[:-1])


def test_chains_are_found_across_modules() -> None:
    class Odd(nn.Module):
        """One forward, no blocks: six steps with a skip over two."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                y = torch.tanh(x @ self.weight)
                x = torch.tanh(y @ self.weight) + x
            return x

    work = Workload(Odd(), lambda model, x: model(x).square().mean(), torch.randn(64, 8))
    planner = Planner("sqrt")
    plain = results(work, lambda batch: work.compute_loss(batch=batch))
    for found, expected in zip(results(work, graph.planned_loss(work, planner)), plain, strict=True):
        assert torch.equal(found, expected)
    assert planner.programs[0].recomputed


def test_stages_of_a_deep_model_are_joined_and_still_simulate_to_the_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(16, 16), nn.Tanh())))
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
    checked = verify(work, made)
    assert checked.ok, str(checked)
    assert checked.storage_peak_bytes == made.storage_peak_bytes
