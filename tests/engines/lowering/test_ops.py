"""The ``ops`` lowering: steps of all kinds give the plain step's bits and the simulator's bytes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lowtide import Workload, zoo
from lowtide.engines import graph
from lowtide.planning.programs.program import simulate

from ...soak import in_soak
from ..counting import Planner, executed_peak, results
from ..planned import squares

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def layers(count: int = 6) -> nn.Sequential:
    return nn.Sequential(*(m for _ in range(count) for m in (nn.Linear(32, 32), nn.GELU())))


def half_frozen() -> Workload:
    work = zoo.small("lenet")
    for parameter in list(work.model.parameters())[:9]:
        parameter.requires_grad_(False)
    return work


def tied() -> Workload:
    model = layers()
    model[4].weight = model[0].weight
    return Workload(model, squares, torch.randn(64, 32))


class Noisy(nn.Module):
    """Draws by two kinds of op, and has a parameter that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(32, 32) for _ in range(5))
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        for linear in self.linears:
            x = nn.functional.dropout(linear(x), 0.3) + torch.rand_like(x)
        return x


class Returning(nn.Module):
    """Views of the batch live long, and sums could be written over it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.MultiheadAttention(32, 4, dropout=0.1, batch_first=True) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, x, x, need_weights=False)[0]
        return x


class Chunked(nn.Module):
    """Views that come as a list, and a sum of two views of one value."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(32, 128)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            a, b, c, d = self.wide(x).chunk(4, dim=1)
            square = (a * b.sigmoid() + c.tanh() * d)[:32]
            square = square + square.t()
            x = torch.cat([square, square.relu()])
        return x


STEPS: dict[str, Callable[[], Workload]] = {
    "chunks": lambda: Workload(Chunked(), squares, torch.randn(64, 32)),
    "half frozen": half_frozen,
    "tied weights": tied,
    "autocast": lambda: Workload(layers(), squares, torch.randn(64, 32), autocast=torch.bfloat16),
    "float64": lambda: Workload(layers().double(), squares, torch.randn(64, 32, dtype=torch.float64)),
    "a batch with gradients": lambda: Workload(layers(), squares, torch.randn(64, 32, requires_grad=True)),
    "noise": lambda: Workload(Noisy(), squares, torch.randn(64, 32)),
    "views of the batch": lambda: Workload(Returning(), squares, torch.randn(16, 8, 32)),
    "attention": lambda: Workload(Attending(), squares, torch.randn(2, 8, 32)),
    "one op": lambda: Workload(nn.Linear(4, 4), lambda model, x: model(x).sum(), torch.randn(2, 4)),
}


@pytest.mark.parametrize("way", ["smallest", *in_soak(["sqrt"])])
@pytest.mark.parametrize("name", STEPS)
def test_steps_of_all_kinds_give_the_plain_steps_bits(name: str, way: str) -> None:
    work = STEPS[name]()
    plain = results(work, lambda batch: work.compute_loss(batch=batch))
    planner = Planner(way)
    loss = graph.planned_loss(work, planner)
    for found, expected in zip(results(work, loss), plain, strict=True):
        assert torch.equal(found, expected)
    assert simulate(planner.programs[0]).peak_bytes == executed_peak(work, loss)
