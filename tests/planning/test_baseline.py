"""The plain step as plans start from it."""

from __future__ import annotations

import pytest
import torch

from lowtide.engines import plan
from lowtide.errors import PlanError
from lowtide.planning import baseline
from lowtide.profiling import Profile
from tests.refusals import refused

from .steps import chain


def test_a_plain_step_that_does_not_fit_is_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    real = baseline.profile_step

    def out_of_memory(work, *, fake, device):
        if not fake:
            raise torch.OutOfMemoryError("the GPU is full")
        return real(work, fake=fake, device=device)

    monkeypatch.setattr(baseline, "profile_step", out_of_memory)
    assert plan(chain(), "60%", tune=False).choices
    with refused("out of memory", "engine='eager'", kind=PlanError):
        plan(chain(), "60%", engine="graph", tune=False)


def test_ops_take_as_long_as_the_step_where_a_gpu_waits_for_the_host(plain: Profile) -> None:
    def seconds(found: Profile, *, stepping: bool) -> float:
        return sum(op.seconds for op in found.graph.ops if (op.phase == "optimizer") == stepping)

    counted = seconds(plain, stepping=False)
    slower = baseline._lasting(plain, 2 * counted)
    assert seconds(slower, stepping=False) == pytest.approx(2 * counted)
    assert seconds(slower, stepping=True) == seconds(plain, stepping=True)
    assert baseline._lasting(plain, counted / 2) is plain
