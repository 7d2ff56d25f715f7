"""Random graphs at random budgets: the bits of plain PyTorch and the bytes of the plan, or a refusal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lowtide import Workload
from lowtide.engines import apply, graph, plan
from lowtide.errors import BudgetError
from lowtide.planning.programs.strategies import plain
from lowtide.profiling import profile

from ...engines.counting import assert_equal, plain_results, results
from ...engines.planned import assert_kept, smallest_budget, work_of
from ...soak import count

WIDTH = 16
STEPS = ("linear", "tied", "conv", "norm", "batch norm", "dropout", "relu", "relu_", "residual", "concat", "chunk",
         "scale", "mix", "plain norm", "unused norm", "average", "gram", "attention", "transposed")  # fmt: skip


class Average(nn.Module):
    """Takes a running average off, and moves it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        average = self.get_buffer("average")
        taken = x - average.clone()
        average.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return taken


class Random(nn.Module):
    """Steps that each read the last value, and some an earlier one too."""

    def __init__(self, steps: Sequence[tuple[str, int]]) -> None:
        super().__init__()
        self.steps = tuple(steps)
        self.first, self.tied = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        layers: dict[str, Callable[[], nn.Module]] = {
            "conv": lambda: nn.Conv1d(4, 4, 3, padding=1),
            "norm": lambda: nn.LayerNorm(WIDTH),
            "batch norm": lambda: nn.BatchNorm1d(WIDTH),
            "plain norm": lambda: nn.BatchNorm1d(WIDTH, affine=False),
            "unused norm": lambda: nn.BatchNorm1d(WIDTH),
            "average": Average,
            "concat": lambda: nn.Linear(2 * WIDTH, WIDTH),
            "chunk": lambda: nn.Linear(WIDTH, 2 * WIDTH),
        }
        self.layers = nn.ModuleList(layers.get(step, lambda: nn.Linear(WIDTH, WIDTH))() for step, _ in steps)

    def forward(self, x: Tensor) -> Tensor:
        values = [self.first(x)]
        for (step, back), layer in zip(self.steps, self.layers, strict=True):
            values.append(self.run(step, layer, values[-1], values[-1 - back % len(values)]))
        return values[-1]

    def run(self, step: str, layer: nn.Module, x: Tensor, earlier: Tensor) -> Tensor:
        match step:
            case "tied":
                return self.tied(x)
            case "conv":
                return layer(x.view(-1, 4, WIDTH // 4)).flatten(1)
            case "dropout":
                return F.dropout(x, 0.3)
            case "relu":
                return F.relu(x)
            case "relu_":
                return F.relu_(layer(x))
            case "residual":
                return x + earlier
            case "concat":
                return layer(torch.cat([x, earlier], dim=1))
            case "chunk":
                left, right = layer(x).chunk(2, dim=1)
                return left * right.sigmoid()
            case "scale":
                return x * layer.bias
            case "mix":
                return x.tanh() @ layer.weight
            case "gram":
                y = layer(x).view(-1, 4, 4)
                return torch.bmm(y, torch.bmm(y.transpose(1, 2), y) / 4).flatten(1)
            case "attention":
                y, z = layer(x).view(-1, 4, 4), earlier.reshape(-1, 4, 4)
                return (torch.softmax(y @ z.transpose(1, 2) / 2, dim=-1) @ y).flatten(1)
            case "transposed":
                return (layer.weight @ x.t()).t() * earlier
            case "unused norm":
                layer(x)
                return x
        return layer(x)


@settings(
    max_examples=count(3, soak=300),
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(
    steps=st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 4)), min_size=3, max_size=14),
    rows=st.integers(2, 200),
    share=st.floats(-0.1, 1, exclude_max=True),
    optimizer=st.booleans(),
)
def test_any_graph_at_any_budget_keeps_bits_and_bytes_or_is_refused(
    steps: list[tuple[str, int]], rows: int, share: float, optimizer: bool
) -> None:
    torch.manual_seed(rows)
    model = Random(steps)
    work = work_of(model, torch.randn(rows, WIDTH))
    work = work if optimizer else replace(work, optimizer=None)
    before = profile(work)
    smallest = smallest_budget(work, before)
    budget = int(smallest + share * (before.peak_bytes - smallest))
    try:
        chosen = plan(work, budget, profile=before, engine="graph", tune=False)
    except BudgetError:
        assert budget < smallest
        return
    assert chosen.peak_bytes <= budget
    if chosen.program is None:
        assert chosen.peak_bytes == before.peak_bytes
        return
    expected = plain_results(work)
    with apply(chosen, work) as step:
        assert_equal(results(work, step.loss), expected)
        assert_kept(step, work, budget)
    torch._dynamo.reset()


def test_backward_leaves_a_loss_that_it_reads_as_it_is() -> None:
    """The gradient of a square root reads the root, which is the loss."""
    work = Workload(nn.Linear(4, 4), lambda model, x: model(x).square().mean().sqrt(), torch.randn(3, 4))
    loss = graph.planned_loss(work, plain)(work.batch)
    before = loss.item()
    loss.backward()
    assert loss.item() == before
