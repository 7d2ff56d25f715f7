"""Steps that are launched as CUDA graphs, on a GPU: results, memory and promises of their programs."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide import Workload, apply, zoo
from lowtide.errors import BudgetError
from lowtide.planning import Plan
from lowtide.tracing.meter import pooled_bytes
from tests.models import squares

from .planned import IN_BACKWARD, Ready, recorded

pytestmark = pytest.mark.gpu

_POOL = 2**27  # beside the plan's bytes: cuBLAS takes 32 MiB of it, and blocks have 20


def compiled(work: Workload) -> Plan:
    """The smallest plan, with room for a recording's pool: on small models, most bytes are cuBLAS's."""
    plain = lowtide.profile(work)
    ways: dict[str, Any] = {"profile": plain, "engine": "graph", "compile": True, "forbid": IN_BACKWARD, "tune": False}
    with pytest.raises(BudgetError) as refused:
        lowtide.plan(work, 1, **ways)
    assert refused.value.smallest_bytes is not None
    chosen = lowtide.plan(work, refused.value.smallest_bytes, **ways)
    return replace(chosen, budget_bytes=chosen.budget_bytes + _POOL)


def convolutions() -> Workload:
    """Activations outweigh all else."""
    blocks = (nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()) for _ in range(6))
    model = nn.Sequential(*blocks).cuda()
    return Workload(model, squares, torch.randn(64, 16, 64, 64, device="cuda"), torch.optim.AdamW(model.parameters()))


@pytest.fixture(scope="module")
def on_gpu() -> Iterator[tuple[Ready, Ready]]:
    """A step that is launched as CUDA graphs, and a twin whose program runs as it is."""
    steps: list[Ready] = []
    for is_recorded in (True, False):
        torch.manual_seed(0)
        work = zoo.small("gpt2", device="cuda", batch=16)
        chosen = compiled(work)
        chosen = recorded(chosen) if is_recorded else chosen
        steps.append(Ready(apply(chosen, work), work, copy.deepcopy(work.model.state_dict())))
    yield steps[0], steps[1]
    for each in steps:
        each.step.undo()


def losses(ready: Ready, steps: int) -> list[Tensor]:
    ready.work.model.load_state_dict(ready.start)
    torch.cuda.manual_seed(3)
    return [ready.step(ready.work.batch) for _ in range(steps)]


def gradients(ready: Ready, micro: int = 1) -> list[Tensor]:
    ready.work.model.load_state_dict(ready.start)
    ready.work.model.zero_grad()
    torch.cuda.manual_seed(4)
    for _ in range(micro):
        (ready.step.loss(ready.work.batch) / micro).backward()
    left = [p.grad.clone() for p in ready.work.model.parameters() if p.grad is not None]
    ready.work.model.zero_grad()
    return left


def assert_close(left: list[list[Tensor]]) -> None:
    """The kernels of both were compiled alone, and gradients of an embedding are sums in any order."""
    for mine, other in zip(*left, strict=True):
        assert (mine - other).norm() <= 1e-5 * other.norm()


def test_a_recorded_step_is_that_of_its_program(on_gpu: tuple[Ready, Ready]) -> None:
    recorded, plain = [losses(each, 6) for each in on_gpu]
    assert pooled_bytes(torch.device("cuda")) > 0
    assert_close([recorded, plain])
    assert len(set(map(float, recorded))) == 6
    for micro in (1, 3):
        assert_close([gradients(each, micro) for each in on_gpu])


def test_an_evaluation_frees_the_recordings_memory(on_gpu: tuple[Ready, Ready]) -> None:
    ready, _ = on_gpu
    losses(ready, 30)
    ready.work.model.zero_grad()
    with torch.no_grad():
        ready.step.loss(ready.work.batch)
    gc.collect()
    assert pooled_bytes(torch.device("cuda")) == 0
    assert_close([gradients(each) for each in on_gpu])
    assert pooled_bytes(torch.device("cuda")) > 0


@pytest.mark.parametrize("name", ["gpt2", "batch norms"])
def test_a_recorded_plan_keeps_its_promise(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    work = zoo.small("gpt2", device="cuda", batch=64) if name == "gpt2" else convolutions()
    verification = lowtide.verify(work, recorded(compiled(work)))
    assert verification.ok, str(verification)
