"""Small fixed orders of ops, by hand and by hypothesis; and small steps."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from lowtide import Workload
from lowtide.planning.programs.liveness import Access, Life, Order
from tests.models import Call, layers, squares

# exp(a * b + 3), the course's example: a and b come from outside.
EXP = Order((Access((), (0,)), Access((0,), (1,), (0,)), Access((1,), (2,), (1,))), (4, 4, 4), frozenset({2}))


@st.composite
def orders(draw: st.DrawFn, most: int = 24) -> Order:
    """Any order: each op reads some of what is there, makes none to two values, and may write over some it reads."""
    ops: list[Access] = []
    sizes: list[int] = []
    for _ in range(draw(st.integers(1, most))):
        reads = tuple(draw(st.lists(st.integers(0, len(sizes) - 1), max_size=3, unique=True))) if sizes else ()
        over = tuple(value for value in reads if draw(st.booleans()))
        made = tuple(range(len(sizes), len(sizes) + draw(st.integers(0, 2))))
        sizes += [draw(st.sampled_from([0, 1, 2, 3, 4, 8, 8, 8, 100])) for _ in made]
        ops.append(Access(reads, made, over))
    kept = draw(st.frozensets(st.integers(0, len(sizes) - 1), max_size=3)) if sizes else frozenset()
    return Order(tuple(ops), tuple(sizes), kept)


@st.composite
def many_lives(draw: st.DrawFn, most: int = 40) -> list[Life]:
    """Lives without an order behind them."""
    lives: list[Life] = []
    for _ in range(draw(st.integers(0, most))):
        born = draw(st.integers(0, 30))
        lives.append(Life(born, born + draw(st.integers(0, 12)), draw(st.integers(0, 9) | st.integers(0, 10**12))))
    return lives


def unrolled(model: Any, inputs: list[Tensor]) -> Tensor:
    """An LSTM of linear layers."""
    state = inputs[0].new_zeros(len(inputs[0]), 16)
    for x in inputs:
        hidden, cell = state[:, :8], state[:, 8:]
        i, f, o, g = (gate(torch.cat([x, hidden], 1)) for gate in model.gates)
        cell = torch.sigmoid(f) * cell + torch.sigmoid(i) * torch.tanh(g)
        state = torch.cat([torch.sigmoid(o) * torch.tanh(cell), cell], 1)
    return state


def mlp(depth: int = 8) -> Workload:
    model = layers(depth, 16, nn.GELU)
    return Workload(model, squares, torch.randn(128, 16))


def convolutions(blocks: int = 8) -> Workload:
    """Convolution, norm, activation: the course's example of what is cheap."""
    parts = [(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(blocks)]
    model = nn.Sequential(*(layer for part in parts for layer in part))
    return Workload(model, squares, torch.randn(4, 8, 8, 8))


def lstm(steps: int = 6) -> Workload:
    batch = [torch.randn(64, 8) for _ in range(steps)]
    return Workload(Call(unrolled, gates=nn.ModuleList(nn.Linear(16, 8) for _ in range(4))), squares, batch)
