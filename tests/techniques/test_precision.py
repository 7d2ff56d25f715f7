"""Lower precision as a technique: autocast, loss scaling, weights in bfloat16."""

from dataclasses import replace

import torch
from torch import nn

import lowtide
from lowtide.profiling import profile
from lowtide.techniques import Option, techniques
from lowtide.techniques.precision import PrecisionConfig
from tests.contract.contract import StepContract
from tests.contract.workloads import WORKLOADS

FLOAT16 = Option("precision", ("",), PrecisionConfig("float16"))
BFLOAT16 = Option("precision", ("",), PrecisionConfig("bfloat16"))
WEIGHTS = Option("precision", ("",), PrecisionConfig("bfloat16", weights=True, rounding="kahan"))


class TestContract(StepContract):
    name = "precision"


def gradients(work):
    work.model.zero_grad()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        work.compute_loss().backward()
    return torch.cat([p.grad.double().flatten() for p in work.model.parameters()])


def test_bfloat16_is_torchs_own_autocast_bit_for_bit():
    work = WORKLOADS["mlp"]()
    expected = gradients(replace(work, autocast=torch.bfloat16))
    with techniques()["precision"].apply(work, [BFLOAT16]) as applied:
        assert torch.equal(gradients(applied.work), expected)


def test_float16_gradients_arrive_in_their_own_size():
    work = WORKLOADS["transformer"]()
    work.model.eval()
    expected = gradients(work)
    with techniques()["precision"].apply(work, [FLOAT16]) as applied:
        actual = gradients(applied.work)
    assert (actual - expected).norm() < 5e-3 * expected.norm()
    assert all(not p._backward_hooks for p in work.model.parameters())


def small_loss(model, batch):
    """A loss whose gradients underflow in float16 on their way."""
    return model(batch).float().mean() * 1e-7


def test_scaling_keeps_gradients_that_float16_alone_would_lose():
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
    work = lowtide.Workload(model, small_loss, torch.randn(8, 16), torch.optim.SGD(model.parameters(), lr=0.1))
    exact = gradients(work)
    lost = gradients(replace(work, autocast=torch.float16))
    with techniques()["precision"].apply(work, [FLOAT16]) as applied:
        actual = gradients(applied.work)
    assert (lost - exact).norm() > 0.2 * exact.norm()
    assert (actual - exact).norm() < 1e-2 * exact.norm()
    with techniques()["precision"].apply(lowtide.microbatch(work, size=4), [FLOAT16]) as applied:
        actual = gradients(applied.work)  # of the first step, too
    assert (actual - exact).norm() < 1e-2 * exact.norm()


def test_bfloat16_weights_halve_parameters_and_gradients_and_train():
    work = WORKLOADS["convnet"]()
    plain = profile(work)
    with techniques()["precision"].apply(work, [WEIGHTS]) as applied:
        actual = profile(applied.work)
        matrices = [p for p in work.model.parameters() if p.ndim > 1]
        assert all(p.dtype == torch.bfloat16 for p in matrices)
        assert all(p.dtype == torch.float32 for p in work.model.parameters() if p.ndim == 1)
        losses = []
        for _ in range(20):
            applied.work.optimizer.zero_grad()
            loss = applied.work.compute_loss()
            loss.backward()
            applied.work.optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < 0.7 * losses[0]
        assert all(b.dtype == torch.float32 for b in work.model.buffers() if b.is_floating_point())
    less = sum(p.numel() * 2 for p in matrices)
    held = [sum(s.bytes for s in p.graph.storages if s.category == "parameter") for p in (plain, actual)]
    assert held[0] - held[1] == less
    assert all(p.dtype == torch.float32 for p in work.model.parameters())


def test_undo_gives_back_gradients_that_were_there_unless_they_changed():
    work = WORKLOADS["mlp"]()
    work.compute_loss().backward()
    before = [(p.grad, p.grad.clone()) for p in work.model.parameters()]
    with techniques()["precision"].apply(work, [WEIGHTS]):
        assert work.model[0].weight.grad.dtype is torch.bfloat16
    for parameter, (held, value) in zip(work.model.parameters(), before, strict=True):
        assert parameter.grad is held
        assert torch.equal(held, value)
    with techniques()["precision"].apply(work, [WEIGHTS]):
        work.model[0].weight.grad.zero_()
    assert not work.model[0].weight.grad.any()


def test_undo_gives_back_what_was_not_trained_bit_for_bit():
    work = WORKLOADS["mlp"]()
    before = [p.detach().clone() for p in work.model.parameters()]
    with techniques()["precision"].apply(work, [WEIGHTS]), torch.no_grad():
        work.model[0].weight[0] += 1
    after = [p.detach() for p in work.model.parameters()]
    assert torch.equal(after[0][1:], before[0][1:])
    assert torch.equal(after[0][0], (before[0][0].bfloat16() + 1).float())
    assert all(torch.equal(a, b) for a, b in zip(after[1:], before[1:], strict=True))
