"""Workloads that are small and have all that is awkward, for the contract and for others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lowtide.workload import Workload
from tests.models import squares

DEVICES = ["cpu", *([pytest.param("cuda", marks=pytest.mark.gpu)] if torch.cuda.is_available() else [])]


class Residual(nn.Module):
    """Batch norm with in-place activations, a second output path, dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)
        self.act = nn.ReLU(inplace=True)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.act(self.norm(self.conv(x))))


class Attention(nn.Module):
    """A pre-norm block that takes a mask by keyword and returns a tuple, as language models do."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.MultiheadAttention(width, 2, dropout=0.1, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, *, mask: Tensor) -> tuple[Tensor, Tensor]:
        y = self.norm(x)
        mixed, weights = self.mix(y, y, y, attn_mask=mask)
        return x + mixed + self.mlp(y), weights.mean()


class Stack(nn.Module):
    """Blocks in a ``nn.ModuleList``, called by hand."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention(width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        mask = x.new_zeros(x.shape[1], x.shape[1])
        extra = x.new_zeros(())
        for layer in self.layers:
            x, weight = layer(x, mask=mask)
            extra = extra + weight
        return x.mean(1) + extra


def _work(name: str, model: nn.Module, *shape: int) -> Workload:
    batch = (torch.randn(*shape), torch.randint(5, (shape[0],)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return Workload(model, lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), batch, optimizer, name=name)


def mlp() -> Workload:
    """A plain chain of layers."""
    layers: list[nn.Module] = []
    for _ in range(6):
        layers += [nn.Linear(16, 16), nn.ReLU(), nn.Dropout(0.5)]
    return _work("mlp", nn.Sequential(*layers, nn.Linear(16, 5)), 12, 16)


def convnet() -> Workload:
    """A stem, a chain of blocks with batch norm, a head."""
    stem = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(inplace=True))
    blocks = nn.Sequential(*(Residual(6) for _ in range(5)))
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5))
    return _work("convnet", nn.Sequential(stem, blocks, head), 4, 3, 9, 7)


def transformer() -> Workload:
    """Blocks with keywords and tuples in a list."""
    return _work("transformer", nn.Sequential(Stack(8, 3), nn.Linear(8, 5)), 4, 6, 8)


def wide() -> Workload:
    """A matrix of 4,096 values under AdamW: what lowers optimizer states leaves smaller ones alone."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5))
    return replace(_work("wide", model, 6, 64), optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2))


def larger(work: Workload) -> Workload:
    """The same with a batch eight times as large: what is saved then outweighs what a checkpoint itself keeps."""
    return replace(work, batch=pytree.tree_map_only(Tensor, lambda t: torch.cat([t] * 8), work.batch))


def moved(work: Workload, device: str) -> Workload:
    """The same on a device; parameters stay those that the optimizer knows."""
    batch = pytree.tree_map_only(Tensor, lambda t: t.to(device), work.batch)
    return replace(work, model=work.model.to(device), batch=batch)


def seeded(make: Callable[[], Workload]) -> Callable[[], Workload]:
    def make_seeded() -> Workload:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return make()

    return make_seeded


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "mlp": seeded(mlp),
    "convnet": seeded(convnet),
    "transformer": seeded(transformer),
}


def chain(depth: int, width: int = 4, batch: int = 3) -> Workload:
    torch.manual_seed(0)
    model = nn.Sequential(*(Residual(width) for _ in range(depth)))
    return Workload(model, squares, torch.randn(batch, width, 6, 5), name="chain")
