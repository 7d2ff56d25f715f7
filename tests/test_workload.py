"""Wrong workloads are refused in words, and a trace leaves all state alone."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.checkpoint import checkpoint

from lowtide import Workload, plan, profile, verify
from lowtide.compat.autograd import top_saved_hooks
from lowtide.errors import WorkloadError
from tests.models import squares
from tests.refusals import refused


@pytest.mark.parametrize(
    ("layer", "name"), [(nn.LazyLinear(4), "0.weight"), (nn.LazyBatchNorm1d(affine=False), "0.running_mean")]
)
def test_a_lazy_model_is_to_run_forward_first(layer: nn.Module, name: str) -> None:
    model, batch = nn.Sequential(layer, nn.Linear(4, 2)), torch.randn(3, 4)
    with refused(name, "forward", kind=WorkloadError):
        Workload(model, squares, batch)
    model(batch)
    assert profile(Workload(model, squares, batch)).peak_bytes > 0


@pytest.mark.parametrize("model", [nn.Linear(4, 4), nn.Embedding(8, 4)])
def test_a_batch_of_inference_mode_that_is_saved_is_named(model: nn.Module) -> None:
    with torch.inference_mode():
        batch = torch.ones(3, 4, dtype=torch.int64 if isinstance(model, nn.Embedding) else torch.float32)
    work = Workload(model, squares, batch)
    for run in (work.compute_loss, lambda: profile(work)):
        with refused("[3, 4]", "torch.inference_mode()", "batch.clone()", kind=WorkloadError):
            run()


def test_a_batch_of_inference_mode_that_is_not_saved_is_traced() -> None:
    with torch.inference_mode():
        batch = torch.randn(3, 4)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return (next(model.parameters()) + batch).mean()

    traced, plain = (profile(Workload(nn.Linear(4, 3), loss, b)) for b in (batch, batch.clone()))
    assert traced.storage_peak_bytes == plain.storage_peak_bytes


def test_an_error_of_the_loss_that_is_not_about_inference_mode_stays_as_it_is() -> None:
    with torch.inference_mode():
        batch = torch.randn(3, 5)
    with refused("size of tensor", kind=RuntimeError):
        Workload(nn.Linear(4, 3), lambda model, batch: batch + model.weight, batch).compute_loss()


@pytest.mark.parametrize("fake", [False, True], ids=["real", "fake"])
def test_a_complex_loss_says_what_to_write(fake: bool) -> None:
    model, batch = nn.Linear(4, 4, dtype=torch.complex64), torch.randn(3, 4, dtype=torch.complex64)
    with refused("complex64", "loss.abs()", "loss.real", kind=WorkloadError):
        profile(Workload(model, squares, batch), fake=fake)
    work = Workload(model, lambda model, batch: squares(model, batch).real, batch)
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
        profile(Workload(model, squares, torch.randn(3, 4), optimizer), fake=fake)
        assert calls == ([] if fake else ["before", "after", "after any"])
        optimizer.step()
        assert calls[-3:] == ["before", "after", "after any"]
    finally:
        everywhere.remove()


def test_an_optimizer_of_another_model_is_refused():
    model, other = nn.Linear(3, 1), nn.Linear(3, 1)
    optimizer = torch.optim.SGD(other.parameters())
    with refused("optimizer", "another model", kind=WorkloadError):
        Workload(model, lambda model, x: model(x).mean(), torch.ones(2, 3), optimizer)
    optimizer.add_param_group({"params": list(model.parameters())})
    Workload(model, lambda model, x: model(x).mean(), torch.ones(2, 3), optimizer)


class Handed(torch.optim.Optimizer):
    """Hands everything on to the optimizer inside, and has no hooks of its own, as accelerate's does."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    param_groups = property(lambda self: self.optimizer.param_groups)
    state = property(lambda self: self.optimizer.state)
    defaults = property(lambda self: self.optimizer.defaults)

    def step(self, closure: Any = None) -> None:
        self.optimizer.step(closure)


def test_an_optimizer_that_only_hands_on_is_the_one_inside() -> None:
    model, batch = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)), torch.randn(256, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    work = Workload(model, squares, batch, Handed(Handed(optimizer)))
    assert work.optimizer is optimizer
    for fake in (False, True):
        plain = profile(Workload(model, squares, batch, optimizer), fake=fake)
        assert profile(work, fake=fake).peak_bytes == plain.peak_bytes
    assert not optimizer.state


class Lookahead(torch.optim.Optimizer):
    """Steps with another optimizer, and every second time halfway back to weights of its own."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.inner = optimizer
        self.param_groups, self.defaults, self.steps = optimizer.param_groups, optimizer.defaults, 0
        self.state = defaultdict(dict)

    def step(self, closure: Any = None) -> None:
        self.inner.step(closure)
        self.steps += 1
        with torch.no_grad():
            for p in (p for group in self.param_groups for p in group["params"]):
                slow = self.state[p].setdefault("slow", p.detach().clone())
                if self.steps % 2 == 0:
                    p.copy_(slow.lerp_(p, 0.5))


def test_an_optimizer_that_steps_with_another_is_traced_and_both_are_restored() -> None:
    model, batch = nn.Linear(64, 64), torch.randn(8, 64)
    optimizer = Lookahead(torch.optim.AdamW(model.parameters()))
    work = Workload(model, squares, batch, optimizer)
    assert work.optimizer is optimizer
    model(batch).sum().backward()
    optimizer.step()
    before = {p: {key: value.clone() for key, value in s.items()} for p, s in optimizer.inner.state.items()}
    assert profile(work).storage_peak_bytes == profile(work, fake=True).storage_peak_bytes
    assert optimizer.steps == 1
    for p, state in before.items():
        assert all(torch.equal(value, optimizer.inner.state[p][key]) for key, value in state.items())


def test_an_optimizer_that_accelerate_prepared_is_planned_for() -> None:
    accelerate = pytest.importorskip("accelerate")
    model, batch = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)), torch.randn(256, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    model, prepared = accelerate.Accelerator(cpu=True).prepare(model, optimizer)
    work = Workload(model, squares, batch, prepared)
    chosen = plan(work, "90%")
    assert verify(work, chosen).ok


@pytest.mark.parametrize("autocast", ["bf16", torch.float64])
def test_an_autocast_that_cannot_be_says_what_can(autocast: Any) -> None:
    with refused("bfloat16", kind=WorkloadError):
        Workload(nn.Linear(4, 4), squares, torch.randn(3, 4), autocast=autocast)


@pytest.mark.parametrize(
    ("loss", "word"),
    [
        (lambda model, x: model(x).mean().detach(), "no graph"),
        (lambda model, x: model(x), "[3, 4]"),
        (lambda model, x: None, "NoneType"),
    ],
)
def test_a_loss_without_a_backward_pass_is_refused(loss: Any, word: str) -> None:
    with refused(word, kind=WorkloadError):
        Workload(nn.Linear(4, 4), loss, torch.randn(3, 4)).compute_loss()


def test_a_batch_on_another_device_is_refused() -> None:
    with refused("meta", kind=WorkloadError):
        Workload(nn.Linear(4, 4), squares, torch.randn(3, 4, device="meta"))


def test_a_checkpoint_that_fails_leaves_no_hooks() -> None:
    def fail(x: Tensor) -> Tensor:
        raise ValueError("inside")

    work = Workload(nn.Linear(2, 2), lambda model, x: checkpoint(fail, model(x), use_reentrant=False), torch.ones(2))
    with pytest.raises(ValueError, match="inside"):
        work.compute_loss()
    assert top_saved_hooks(True) is None
