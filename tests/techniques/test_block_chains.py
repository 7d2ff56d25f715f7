from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lowtide.profiling import profile
from lowtide.techniques.block_chains import BlockChains, leaves, split
from lowtide.workload import Workload
from tests.models import squares


def chains(model: nn.Module, *shape: int) -> BlockChains:
    work = Workload(model, squares, torch.randn(*shape))
    return BlockChains(profile(work, fake=True))


def blocks_of(model: nn.Module, *shape: int) -> dict[str, list[int]]:
    """Positions of the blocks in each container's chains."""
    positions: dict[str, list[int]] = {}
    for chain in chains(model, *shape).chains:
        positions.setdefault(chain.container, []).extend(block.position for block in chain.blocks)
    return positions


def block(width: int = 4) -> nn.Module:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.body(x)

    return Block()


class Wrapper(nn.Module):
    """Blocks in a list, called one after the other."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Noisy(nn.Module):
    """Noise from a generator: torch's, or one of its own."""

    def __init__(self, generator: torch.Generator | None) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.generator = generator

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x)) * torch.rand(x.shape, generator=self.generator)


class FunctionalRReLU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rrelu(x, training=True)


@given(weights=st.lists(st.integers(0, 100), min_size=1, max_size=30), data=st.data())
def test_split_gives_as_many_parts_as_asked_none_empty(weights: list[int], data: Any) -> None:
    parts = data.draw(st.integers(1, len(weights)))
    spans = split(weights, parts)
    assert len(spans) == parts
    assert [i for low, high in spans for i in range(low, high)] == list(range(len(weights)))
    assert all(low < high for low, high in spans)


def stage(blocks: int) -> nn.Sequential:
    return nn.Sequential(*(block() for _ in range(blocks)))


def noisy(last: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), last)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (stage(2), {"": [0, 1]}),  # each has three layers inside, more than there are blocks
        (
            nn.Sequential(nn.Linear(4, 4), nn.Tanh(), stage(3), stage(2), nn.Linear(4, 1)),
            {"": [0, 1, 4], "2": [0, 1, 2], "3": [0, 1]},
        ),
        (
            nn.Sequential(Wrapper([block() for _ in range(4)]), nn.Linear(4, 1)),
            {"0.layers": [0, 1, 2, 3], "": [1]},
        ),
        (nn.Sequential(OrderedDict((name, block()) for name in ("one", "two", "three"))), {"": [0, 1, 2]}),
        (nn.Linear(4, 3), {}),
        # A checkpoint would stop in the noise of a function.
        (nn.Sequential(*map(noisy, (nn.RReLU(), FunctionalRReLU(), nn.RReLU()))), {"": [0, 2]}),
    ],
    ids=["blocks", "stages", "a list in a wrapper", "names", "no chain", "noise"],
)
def test_chains_are_the_blocks_of_containers(model: nn.Module, expected: dict[str, list[int]]) -> None:
    assert blocks_of(model, 2, 4) == expected
    assert all(chain.joined == (not chain.container.endswith("layers")) for chain in chains(model, 2, 4).chains)


@pytest.mark.parametrize(
    ("layers", "glued"),
    [
        ([nn.Conv2d(3, 4, 1), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 1)], [False, True, False]),
        ([nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 1)], [False, False, False]),
        ([nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Flatten()], [False, False, True]),
    ],
)
def test_no_segment_can_start_with_a_layer_that_writes_into_its_input(layers: list, glued: list) -> None:
    (chain,) = chains(nn.Sequential(*layers), 2, 3, 4, 4).chains
    assert [b.glued for b in chain.blocks] == glued


def test_spans_follow_the_tree() -> None:
    model = chains(nn.Sequential(*(block() for _ in range(6))), 2, 4)
    assert model.spans({"": ((1, 2), ((3,), (4, 5)))}) == [(1, 3), (3, 6), (3, 4), (4, 6)]
    assert list(leaves(((1, 2), ((3,), (4, 5))))) == [1, 2, 3, 4, 5]


def test_a_block_that_draws_from_its_own_generator_is_in_no_chain() -> None:
    own, default = torch.Generator(), torch.default_generator
    model = nn.Sequential(*(Noisy(g) for g in (None, own, default, None, own)))
    assert [[b.position for b in chain.blocks] for chain in chains(model, 3, 4).chains] == [[0], [2, 3]]
    assert chains(nn.Sequential(Noisy(own), Noisy(own)), 3, 4).chains == ()


@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_a_block_that_draws_from_pythons_or_numpys_generator_is_in_no_chain(draw: Callable[[], float]) -> None:
    class Drawing(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * draw()

    plain = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(5)]
    drawing = Drawing(nn.Linear(4, 4), nn.Tanh())
    model = nn.Sequential(*plain[:3], drawing, *plain[3:])
    assert [[b.position for b in chain.blocks] for chain in chains(model, 3, 4).chains] == [[0, 1, 2], [4, 5]]
