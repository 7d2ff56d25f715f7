"""Random small models: fake equals real to the byte, real equals the allocator, and nothing changes."""

import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from lowtide import Workload
from lowtide.tracing import trace
from tests.models import Call
from tests.soak import count
from tests.tracing.allocator import allocated_peak
from tests.tracing.comparing import assert_same, snapshot

WIDTH = 32
EXAMPLES = count(8, soak=200)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * ctx.saved_tensors[0] * gradient


def branch(m, layer, x):
    left, right = layer(x).chunk(2, dim=1)
    return torch.cat([left.tanh(), right * left], dim=1)


STEPS = {  # small habits of real models: of the model, the step's own layer and the last result
    "linear": lambda m, layer, x: layer(x),
    "norm": lambda m, layer, x: layer(x),
    "batch norm": lambda m, layer, x: layer(x),
    "shared": lambda m, layer, x: m.shared(x),
    "relu": lambda m, layer, x: F.relu(x),
    "relu_": lambda m, layer, x: F.relu_(layer(x)),
    "dropout": lambda m, layer, x: F.dropout(x, 0.3),
    "residual": lambda m, layer, x: x + layer(x),
    "branch": branch,
    "view": lambda m, layer, x: layer(x.view(-1, 2, WIDTH // 2).transpose(1, 2).reshape(-1, WIDTH)),
    "in place": lambda m, layer, x: layer(x).add_(1).mul_(0.5),
    "checkpoint": lambda m, layer, x: checkpoint(lambda y: F.dropout(layer(y).tanh(), 0.2), x, use_reentrant=False),
    "detour": lambda m, layer, x: x * layer(x.detach()).sigmoid(),
    "softmax": lambda m, layer, x: F.softmax(layer(x), dim=1),
    "custom": lambda m, layer, x: Square.apply(x).clamp(max=4.0),
    "transposed": lambda m, layer, x: layer(x.view(2, -1, WIDTH).transpose(0, 1)).reshape(-1, WIDTH),
    "picked": lambda m, layer, x: layer(x)[:, torch.arange(WIDTH).flip(0)].max(1, keepdim=True).values * x,
    "scaled": lambda m, layer, x: 0.5 * layer(x) / 3,
}
LAYERS = {"norm": nn.LayerNorm, "batch norm": nn.BatchNorm1d}


def random_model(steps):
    def run(m, x):
        for step, layer in zip(steps, m.layers, strict=True):
            x = STEPS[step](m, layer, x)
        return x

    layers = (LAYERS[step](WIDTH) if step in LAYERS else nn.Linear(WIDTH, WIDTH) for step in steps)
    return Call(run, shared=nn.Linear(WIDTH, WIDTH), layers=nn.ModuleList(layers))


def one_loss(model, batch):
    return model(batch).mean()


def two_losses(model, batch):
    out = model(batch)
    return out.pow(2).mean() + model.shared(out).abs().mean()


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(
    steps=st.lists(st.sampled_from(list(STEPS)), min_size=1, max_size=8),
    rows=st.integers(2, 50),
    losses=st.sampled_from([one_loss, two_losses]),
    optimizer=st.sampled_from(["none", "sgd", "adam"]),
    seed=st.integers(0, 3),
)
def test_random_models_keep_every_promise(steps, rows, losses, optimizer, seed):
    torch.manual_seed(seed)
    model = random_model(steps)
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
