"""Recomputed cheap results keep the plain step's bits; each strategy takes less than the one before."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from lowtide import Workload, zoo
from lowtide.planning.programs.strategies import (
    StrategyBytes,
    compare_strategies,
)
from lowtide.tracing.capture.loss import capture_joint
from tests.planning.orders import convolutions, lstm, mlp

STEPS: dict[str, Callable[[], Workload]] = {
    "mlp": mlp,
    "convolutions": convolutions,
    "lstm": lstm,
    "resnet": lambda: zoo.small("wrn28-2", depth=10),
    "dropout": lambda: zoo.small("gpt2"),
}


@cache
def usages_of(name: str, depth: int | None = None) -> tuple[StrategyBytes, ...]:
    return compare_strategies(capture_joint(STEPS[name]() if depth is None else mlp(depth)))


@pytest.mark.parametrize("name", ["mlp", "convolutions", "lstm", "resnet"])
def test_each_strategy_takes_less_than_the_one_before(name: str) -> None:
    none, in_place, sharing, both, cheap, segments = (usage.bytes for usage in usages_of(name))
    assert none > in_place > both
    assert none > sharing >= both > cheap > segments


@pytest.mark.parametrize("name", ["mlp", "convolutions", "lstm", "resnet"])
def test_no_way_to_give_out_memory_takes_less_than_what_lives(name: str) -> None:
    for usage in usages_of(name):
        assert usage.live_bytes <= min(usage.bytes, usage.tagged_bytes, usage.pooled_bytes)
        assert usage.bytes <= 1.05 * usage.live_bytes  # best fit over intervals loses little on real steps
        assert 0 <= usage.fragmentation < 1


def test_bytes_of_an_mlp_by_hand() -> None:
    """Six layers of 8 KiB: pre-activations and activations are kept; the last activation, and two more in backward."""
    one = 128 * 16 * 4
    none, _, sharing, both, cheap, _ = usages_of("mlp", 6)
    # Forward: 6 of addmm, 6 of gelu, the square. Backward: the square's by div, pow, mul and mul; 6 of gelu's, 5 of mm.
    assert none.bytes // one == 6 + 6 + 1 + 4 + 6 + 5
    assert sharing.bytes // one == 12 + 2
    assert both.bytes // one == 12 + 1
    assert cheap.bytes // one == 6 + 2


def test_segments_grow_slower_than_the_depth() -> None:
    shallow, deep = usages_of("mlp", 6), usages_of("mlp", 24)
    assert deep[-1].bytes <= 2 * shallow[-1].bytes  # √4
    assert deep[3].bytes > 3.5 * shallow[3].bytes
