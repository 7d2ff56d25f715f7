"""The ``ops`` lowering: steps of all kinds give the plain step's bits and the simulator's bytes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lowtide import Workload, zoo
from lowtide.engines import graph
from lowtide.planning.programs.program import simulate
from tests.models import InTurn, layers, squares

from ...soak import in_soak
from ..counting import Planner, assert_equal, executed_peak, plain_results, results

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def gram(linear: nn.Module, x: Tensor) -> Tensor:
    """Batched products of a result with its own transpose: views of a base that nothing else reads."""
    y = linear(x)
    return x + torch.bmm(y, torch.bmm(y.transpose(1, 2), y) / 64)


@pytest.mark.parametrize("way", ["all", "middle", "smallest"])
def test_views_hold_the_bytes_of_a_base_that_is_gone(way: str) -> None:
    planner = Planner(way)
    work = Workload(InTurn(*(nn.Linear(8, 8) for _ in range(3)), each=gram), squares, torch.randn(2, 64, 8))
    peak = executed_peak(work, graph.planned_loss(work, planner))
    assert simulate(planner.programs[0]).peak_bytes == peak


def half_frozen() -> Workload:
    work = zoo.small("lenet")
    for parameter in list(work.model.parameters())[:9]:
        parameter.requires_grad_(False)
    return work


def tied() -> Workload:
    model = layers(6, 32, nn.GELU)
    model[4].weight = model[0].weight
    return Workload(model, squares, torch.randn(64, 32))


def noisy() -> InTurn:
    """Draws by two kinds of op, and has a parameter that nothing uses."""
    linears = (nn.Linear(32, 32) for _ in range(5))
    model = InTurn(*linears, each=lambda linear, x: nn.functional.dropout(linear(x), 0.3) + torch.rand_like(x))
    model.unused = nn.Linear(2, 2)
    return model


def encoder() -> InTurn:
    """Views of the batch live long, and sums could be written over it."""
    return InTurn(*(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True) for _ in range(3)))


def attending() -> InTurn:
    attentions = (nn.MultiheadAttention(32, 4, dropout=0.1, batch_first=True) for _ in range(3))
    return InTurn(*attentions, each=lambda attention, x: x + attention(x, x, x, need_weights=False)[0])


def in_chunks(wide: nn.Module, x: Tensor) -> Tensor:
    """Views that come as a list, and a sum of two views of one value."""
    a, b, c, d = wide(x).chunk(4, dim=1)
    square = (a * b.sigmoid() + c.tanh() * d)[:32]
    square = square + square.t()
    return torch.cat([square, square.relu()])


STEPS: dict[str, Callable[[], Workload]] = {
    "chunks": lambda: Workload(InTurn(*[nn.Linear(32, 128)] * 3, each=in_chunks), squares, torch.randn(64, 32)),
    "half frozen": half_frozen,
    "tied weights": tied,
    "autocast": lambda: Workload(layers(6, 32, nn.GELU), squares, torch.randn(64, 32), autocast=torch.bfloat16),
    "float64": lambda: Workload(layers(6, 32, nn.GELU).double(), squares, torch.randn(64, 32, dtype=torch.float64)),
    "a batch with gradients": lambda: Workload(
        layers(6, 32, nn.GELU), squares, torch.randn(64, 32, requires_grad=True)
    ),
    "noise": lambda: Workload(noisy(), squares, torch.randn(64, 32)),
    "views of the batch": lambda: Workload(encoder(), squares, torch.randn(16, 8, 32)),
    "attention": lambda: Workload(attending(), squares, torch.randn(2, 8, 32)),
    "one op": lambda: Workload(nn.Linear(4, 4), lambda model, x: model(x).sum(), torch.randn(2, 4)),
}


@pytest.mark.parametrize("way", ["smallest", *in_soak(["sqrt"])])
@pytest.mark.parametrize("name", STEPS)
def test_steps_of_all_kinds_give_the_plain_steps_bits(name: str, way: str) -> None:
    work = STEPS[name]()
    plain = plain_results(work)
    planner = Planner(way)
    loss = graph.planned_loss(work, planner)
    assert_equal(results(work, loss), plain)
    assert simulate(planner.programs[0]).peak_bytes == executed_peak(work, loss)
