"""Generated code frees each result after its last use, with the simulator's bytes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lowtide import Workload
from lowtide.engines import graph
from lowtide.planning.programs.program import simulate
from tests.models import squares

from ..counting import Planner, executed_peak


class Grams(nn.Module):
    """Batched products of a result with its own transpose: views of a base that nothing else reads."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for linear in self.linears:
            y = linear(x)
            x = x + torch.bmm(y, torch.bmm(y.transpose(1, 2), y) / 64)
        return x


@pytest.mark.parametrize("way", ["all", "middle", "smallest"])
def test_views_hold_the_bytes_of_a_base_that_is_gone(way: str) -> None:
    planner = Planner(way)
    work = Workload(Grams(), squares, torch.randn(2, 64, 8))
    peak = executed_peak(work, graph.planned_loss(work, planner))
    assert simulate(planner.programs[0]).peak_bytes == peak
