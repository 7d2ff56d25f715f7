"""Views, in-place ops, tensors saved twice, shared parameters, custom functions: each storage is counted once."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from lowtide import Workload
from lowtide.tracing import trace
from tests.models import Call
from tests.tracing.allocator import allocated_peak
from tests.tracing.layers import mean_loss


class Cube(torch.autograd.Function):
    """Saves its input and a tensor that only it knows."""

    @staticmethod
    def forward(ctx, x):
        square = x * x
        ctx.save_for_backward(x, square)
        return square * x

    @staticmethod
    def backward(ctx, gradient):
        _, square = ctx.saved_tensors
        return 3 * square * gradient


def tied(m, x):
    return F.linear(m.a(x), m.a.weight)


def branches(m, x):
    left, right = m.a(x).chunk(2, dim=-1)
    return torch.cat([left.relu(), right.sigmoid() * left], dim=-1)


def in_place(m, x):
    return m.b(m.a(x).relu_()).mul_(2).add_(1)


def views(m, x):
    y = m.a(x).view(-1, 4, 16).transpose(1, 2)
    return y.reshape(-1, 64)[:, ::2] * y.flatten(1)[:, 1::2]


def checkpointed(m, x):
    return checkpoint(m.b, checkpoint(m.a, x, use_reentrant=False), use_reentrant=False)


def reentrant(m, x):
    return checkpoint(m.b, m.a(x).relu(), use_reentrant=True)


def offloaded(m, x):
    with torch.autograd.graph.save_on_cpu():
        return m.b(m.a(x).relu())


def two_losses(m, x):
    y = m.a(x)
    return torch.stack([y.pow(2).mean(), m.b(y.relu()).abs().mean()])


def layers():
    return {"a": nn.Linear(64, 64), "b": nn.Linear(64, 64)}


MODELS = {
    "tied weights": Call(tied, a=nn.Linear(64, 64)),
    "branches": Call(branches, **layers()),
    "in place": Call(in_place, **layers()),
    "views": Call(views, **layers()),
    "custom function": Call(lambda m, x: Cube.apply(m.b(Cube.apply(m.a(x)))), **layers()),
    "checkpointed": Call(checkpointed, **layers()),
    "checkpointed with dropout": Call(
        lambda m, x: checkpoint(m.a, x, use_reentrant=False), a=nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5))
    ),
    "reentrant checkpoint": Call(reentrant, **layers()),
    "saved on the CPU": Call(offloaded, **layers()),
    "two losses": Call(two_losses, **layers()),
    "the same module twice": Call(lambda m, x: m.a(m.a(x).tanh()), a=nn.Linear(64, 64)),
    "saved twice": Call(lambda m, x: (y := m.a(x)) * y + y.exp(), a=nn.Linear(64, 64)),
    "frozen layer": Call(lambda m, x: m.b(m.a(x)), a=nn.Linear(64, 64).requires_grad_(False), b=nn.Linear(64, 64)),
    "no_grad inside": Call(lambda m, x: m.a(x) * torch.no_grad()(m.b)(x).detach(), **layers()),
}


@pytest.mark.parametrize("name", MODELS)
def test_fake_equals_real_and_real_equals_the_allocator(name):
    model = MODELS[name]
    batch = torch.randn(96, 64)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3, momentum=0.9)
    work = Workload(model, mean_loss, batch, optimizer)
    real, fake = trace(work), trace(work, fake=True)
    assert fake.storage_peak_bytes == real.storage_peak_bytes
    assert real.peak_bytes == pytest.approx(allocated_peak(model, work.loss, batch, optimizer), rel=0.01)


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(64), nn.GroupNorm(4, 64), nn.LayerNorm(64)])
def test_a_norm_of_the_input_itself_makes_no_gradient_of_it(norm):
    work = Workload(norm, mean_loss, torch.randn(96, 64))
    assert trace(work).storage_peak_bytes == trace(work, fake=True).storage_peak_bytes


def test_shared_storages_count_once():
    x = torch.randn(1000, 10)
    work = Workload(
        nn.Linear(10, 1), lambda model, batch: sum(model(part).mean() for part in batch), [x, x[:500], x.T.T]
    )
    graph = trace(work)
    assert [s.bytes for s in graph.storages if s.category == "input"] == [40_000]


def test_autocast_keeps_one_cast_of_a_weight_that_is_used_twice():
    model = Call(lambda m, x: m.a(m.a(x)), a=nn.Linear(64, 64, bias=False))
    graph = trace(Workload(model, mean_loss, torch.randn(8, 64), autocast=torch.bfloat16))
    casts = [s for s in graph.storages if s.bytes == 64 * 64 * 2 and s.label.startswith("_to_copy")]
    assert len(casts) == 1


def test_a_resized_storage_starts_a_new_life():
    def grow(m, x):
        scratch = torch.empty(10)
        scratch.resize_(1000)
        return m.a(x) + scratch.zero_()[:64]

    work = Workload(Call(grow, a=nn.Linear(64, 64)), mean_loss, torch.randn(8, 64))
    real, fake = trace(work), trace(work, fake=True)
    assert 4000 in {s.bytes for s in real.storages}
    assert real.storage_peak_bytes == fake.storage_peak_bytes
