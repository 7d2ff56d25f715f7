"""The plain step as plans start from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from lowtide.engines import apply, plan
from lowtide.errors import PlanError
from lowtide.planning import baseline, captured
from lowtide.profiling import Profile
from lowtide.techniques import Fidelity
from lowtide.workload import Workload
from tests.refusals import refused

from .steps import chain


@pytest.fixture
def small_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Let plain steps of more than some samples run out of memory."""

    def limit(samples: int) -> None:
        profile_step, compare, run = baseline.profile_step, captured.loss_and_gradients, captured._run

        def profiled(work: Workload, *, fake: bool, **options: Any) -> Profile:
            if not fake:
                raise torch.OutOfMemoryError("the GPU is full")
            return profile_step(work, fake=True, **options)

        def plain(work: Workload, **options: Any) -> Any:
            if len(work.batch) > samples:
                raise torch.OutOfMemoryError("the GPU is full")
            return compare(work, **options)

        monkeypatch.setattr(baseline, "profile_step", profiled)
        monkeypatch.setattr(captured, "loss_and_gradients", plain)
        monkeypatch.setattr(
            captured, "_run", lambda work, *rest: run(work, *rest) if len(work.batch) <= samples else []
        )

    return limit


@pytest.mark.parametrize(("samples", "note"), [(300, "on 256 of 1024 samples"), (0, "was not compared")])
def test_a_plain_step_that_does_not_fit_is_planned_and_compared_on_the_samples_that_do(
    small_gpu: Callable[[int], None], samples: int, note: str
) -> None:
    expected = chain(2)
    expected.compute_loss().backward()
    small_gpu(samples)
    work = chain(2)
    made = plan(work, "60%", engine="graph", tune=False)
    assert made.program is not None
    assert made.fidelity is (Fidelity.BITWISE if samples else Fidelity.ROUNDOFF)
    assert any(note in said for said in made.notes)
    with apply(made, work) as step:
        step.loss(work.batch).backward()
        for ours, plain in zip(work.model.parameters(), expected.model.parameters(), strict=True):
            assert ours.grad is not None
            assert torch.equal(ours.grad, plain.grad)


def test_a_step_that_does_not_fit_on_the_eager_engine_is_predicted(small_gpu: Callable[[int], None]) -> None:
    small_gpu(0)
    assert plan(chain(), "60%", engine="eager", tune=False).choices


def test_a_capture_that_gives_other_results_on_few_samples_is_refused(small_gpu: Callable[[int], None]) -> None:
    small_gpu(300)
    work = chain(2)
    other = replace(work, loss=lambda m, x: m(x).square().mean() * (1.1 if torch.compiler.is_compiling() else 1.0))
    with refused("1.0e-01", "loss, gradients", kind=PlanError):
        plan(other, "60%", engine="graph", tune=False)


def test_ops_take_as_long_as_the_step_where_a_gpu_waits_for_the_host(plain: Profile) -> None:
    def seconds(found: Profile, *, stepping: bool) -> float:
        return sum(op.seconds for op in found.graph.ops if (op.phase == "optimizer") == stepping)

    counted = seconds(plain, stepping=False)
    slower = baseline._lasting(plain, 2 * counted)
    assert seconds(slower, stepping=False) == pytest.approx(2 * counted)
    assert seconds(slower, stepping=True) == seconds(plain, stepping=True)
    assert baseline._lasting(plain, counted / 2) is plain
