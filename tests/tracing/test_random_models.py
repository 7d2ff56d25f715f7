"""Random small models: fake equals real to the byte, real equals the allocator, and nothing changes."""

import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from lowtide import Workload
from lowtide.tracing import trace
from tests.soak import count
from tests.tracing.allocator import allocated_peak
from tests.tracing.comparing import assert_same, snapshot

WIDTH = 32
EXAMPLES = count(8, soak=200)

STEPS = (
    "linear", "shared", "relu", "relu_", "dropout", "norm", "batch norm", "residual", "branch", "view", "in place",
    "checkpoint", "detour", "softmax", "custom", "transposed", "picked", "scaled",
)  # fmt: skip


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * ctx.saved_tensors[0] * gradient


class RandomModel(nn.Module):
    """A chain of steps, each a small habit of real models."""

    def __init__(self, steps):
        super().__init__()
        self.steps = steps
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(
            nn.BatchNorm1d(WIDTH)
            if step == "batch norm"
            else nn.LayerNorm(WIDTH)
            if step == "norm"
            else nn.Linear(WIDTH, WIDTH)
            for step in steps
        )

    def forward(self, x):
        for step, layer in zip(self.steps, self.layers, strict=True):
            x = self.apply_step(step, layer, x)
        return x

    def apply_step(self, step, layer, x):
        if step in ("linear", "norm", "batch norm"):
            return layer(x)
        if step == "shared":
            return self.shared(x)
        if step == "relu":
            return F.relu(x)
        if step == "relu_":
            return F.relu_(layer(x))
        if step == "dropout":
            return F.dropout(x, 0.3)
        if step == "residual":
            return x + layer(x)
        if step == "branch":
            left, right = layer(x).chunk(2, dim=1)
            return torch.cat([left.tanh(), right * left], dim=1)
        if step == "view":
            return layer(x.view(-1, 2, WIDTH // 2).transpose(1, 2).reshape(-1, WIDTH))
        if step == "in place":
            return layer(x).add_(1).mul_(0.5)
        if step == "checkpoint":
            return checkpoint(lambda y: F.dropout(layer(y).tanh(), 0.2), x, use_reentrant=False)
        if step == "detour":
            return x * layer(x.detach()).sigmoid()
        if step == "softmax":
            return F.softmax(layer(x), dim=1)
        if step == "transposed":
            return layer(x.view(2, -1, WIDTH).transpose(0, 1)).reshape(-1, WIDTH)
        if step == "picked":
            return layer(x)[:, torch.arange(WIDTH, device=x.device).flip(0)].max(1, keepdim=True).values * x
        if step == "scaled":
            return 0.5 * layer(x) / 3
        return Square.apply(x).clamp(max=4.0)


def one_loss(model, batch):
    return model(batch).mean()


def two_losses(model, batch):
    out = model(batch)
    return out.pow(2).mean() + model.shared(out).abs().mean()


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(
    steps=st.lists(st.sampled_from(STEPS), min_size=1, max_size=8),
    rows=st.integers(2, 50),
    losses=st.sampled_from([one_loss, two_losses]),
    optimizer=st.sampled_from(["none", "sgd", "adam"]),
    seed=st.integers(0, 3),
)
def test_random_models_keep_every_promise(steps, rows, losses, optimizer, seed):
    torch.manual_seed(seed)
    model = RandomModel(tuple(steps))
    batch = torch.randn(rows * 2, WIDTH)
    optimizers = {
        "none": None,
        "sgd": torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9),
        "adam": torch.optim.Adam(model.parameters(), lr=1e-3),
    }
    work = Workload(model, losses, batch, optimizers[optimizer])
    if not losses(model, batch).requires_grad:
        return  # nothing but functions of the input: there is no step to trace
    before = snapshot(work)
    real, fake = trace(work), trace(work, fake=True)
    assert_same(before, snapshot(work))
    assert fake.storage_peak_bytes == real.storage_peak_bytes
    assert [op.name for op in fake.ops] == [op.name for op in real.ops]
    assert real.peak_bytes == allocated_peak(model, losses, batch, work.optimizer)
