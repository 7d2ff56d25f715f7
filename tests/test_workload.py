"""What a workload cannot be is said in words; what a trace may not touch is left alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from lowtide import Workload, profile
from lowtide.errors import WorkloadError


def square_loss(model: nn.Module, batch: Any) -> Tensor:
    return model(batch).square().mean()


@pytest.mark.parametrize(
    ("layer", "name"), [(nn.LazyLinear(4), "0.weight"), (nn.LazyBatchNorm1d(affine=False), "0.running_mean")]
)
def test_a_lazy_model_is_to_run_forward_first(layer: nn.Module, name: str) -> None:
    model, batch = nn.Sequential(layer, nn.Linear(4, 2)), torch.randn(3, 4)
    with pytest.raises(WorkloadError, match=rf"{name} has no shape yet.*Run one forward first"):
        Workload(model, square_loss, batch)
    model(batch)
    assert profile(Workload(model, square_loss, batch)).peak_bytes > 0


@pytest.mark.parametrize("model", [nn.Linear(4, 4), nn.Embedding(8, 4)])
def test_a_batch_of_inference_mode_that_is_saved_is_named(model: nn.Module) -> None:
    with torch.inference_mode():
        batch = torch.ones(3, 4, dtype=torch.int64 if isinstance(model, nn.Embedding) else torch.float32)
    work = Workload(model, square_loss, batch)
    for run in (work.compute_loss, lambda: profile(work)):
        with pytest.raises(WorkloadError, match=r"shape \[3, 4\].*torch\.inference_mode\(\).*batch\.clone\(\)"):
            run()


def test_a_batch_of_inference_mode_that_is_not_saved_is_traced() -> None:
    with torch.inference_mode():
        batch = torch.randn(3, 4)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return (next(model.parameters()) + batch).mean()

    found, plain = (profile(Workload(nn.Linear(4, 3), loss, b)) for b in (batch, batch.clone()))
    assert found.storage_peak_bytes == plain.storage_peak_bytes


def test_an_error_of_the_loss_that_is_not_about_inference_mode_stays_as_it_is() -> None:
    with torch.inference_mode():
        batch = torch.randn(3, 5)
    with pytest.raises(RuntimeError, match="must match the size"):
        Workload(nn.Linear(4, 3), lambda model, batch: batch + model.weight, batch).compute_loss()


@pytest.mark.parametrize("fake", [False, True], ids=["real", "fake"])
def test_a_complex_loss_says_what_to_write(fake: bool) -> None:
    model, batch = nn.Linear(4, 4, dtype=torch.complex64), torch.randn(3, 4, dtype=torch.complex64)
    with pytest.raises(WorkloadError, match=r"complex64.*loss\.abs\(\) or loss\.real"):
        profile(Workload(model, square_loss, batch), fake=fake)
    work = Workload(model, lambda model, batch: square_loss(model, batch).real, batch)
    assert profile(work, fake=fake).peak_bytes > 0


@pytest.mark.parametrize("fake", [False, True], ids=["real", "fake"])
def test_the_optimizers_step_hooks_run_in_a_real_step_alone(fake: bool) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters())
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    everywhere = register_optimizer_step_post_hook(lambda *_: calls.append("after any"))
    try:
        profile(Workload(model, square_loss, torch.randn(3, 4), optimizer), fake=fake)
        assert calls == ([] if fake else ["before", "after", "after any"])
        optimizer.step()
        assert calls[-3:] == ["before", "after", "after any"]
    finally:
        everywhere.remove()


def test_an_optimizer_of_another_model_is_refused():
    model, other = nn.Linear(3, 1), nn.Linear(3, 1)
    optimizer = torch.optim.SGD(other.parameters())
    with pytest.raises(WorkloadError, match="another model"):
        Workload(model, lambda model, x: model(x).mean(), torch.ones(2, 3), optimizer)
    optimizer.add_param_group({"params": list(model.parameters())})
    Workload(model, lambda model, x: model(x).mean(), torch.ones(2, 3), optimizer)
