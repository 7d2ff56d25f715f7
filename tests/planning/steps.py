"""Small steps for planning tests, and a technique whose fidelity can be chosen."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from lowtide.profiling import Profile
from lowtide.techniques import Applied, Check, Config, Fidelity, Option, Price
from lowtide.techniques.sqrt import checkpoint_segments
from lowtide.workload import Workload
from tests.models import blocks, squares


class Block(nn.Module):
    """Three layers, of which a recomputed chain keeps nothing but the block's input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(16, 16), nn.Tanh())))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def chain(depth: int = 4) -> Workload:
    """A chain of equal blocks whose activations outweigh all else."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(depth)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return Workload(model, squares, torch.randn(1024, 16), optimizer, name="chain")


class Loose:
    """Recomputes in two levels, and says of itself whatever it is told to say."""

    kind = "hold"
    config = Config
    needs = "a chain"
    conflicts: Mapping[str, str] = {"sqrt": "it recomputes too", "optimal": "it recomputes too"}

    def __init__(self, fidelity: Fidelity = Fidelity.CHANGED, *, name: str = "loose", fails: bool = False) -> None:
        self.name = name
        self.fidelity = fidelity
        self.fails = fails

    def options(self, profile: Profile) -> list[Option]:
        return [Option(self.name, ("",))]

    def price(self, option: Option, profile: Profile) -> Price:
        return Price(self.fidelity, compute_seconds=100.0)

    def apply(self, work: Workload, options: Sequence[Option]) -> Applied:
        if self.fails:
            raise RuntimeError("this one never works")
        assert isinstance(work.model, nn.Sequential)
        return Applied(work, checkpoint_segments(work.model, levels=2))

    def check(self, option: Option) -> Check:
        return Check(self.fidelity, rtol=1.0)


def tanh_layers(loss: Callable[[nn.Module, Tensor], Tensor]) -> Workload:
    model = blocks(4, 24)
    return Workload(model, loss, torch.randn(96, 24))
