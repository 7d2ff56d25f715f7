"""Bytes of each liveness strategy for one step: no reuse, in place, sharing, recomputation.

    for usage in compare_strategies(capture_joint(work)):
        print(usage.strategy, format_size(usage.bytes))

Counted are the results of ops; parameters, inputs and gradients of parameters have their own places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lowtide.chains import Chain, keep_all, sqrt
from lowtide.planning.programs.arena import arena, pool, share
from lowtide.planning.programs.chain_order import program_of
from lowtide.planning.programs.liveness import Life, Order, lives, lives_in_place, order_of, peak_bytes
from lowtide.planning.programs.program import Program
from lowtide.planning.programs.stages import Stages
from lowtide.tracing.capture.joint import Joint


@dataclass(frozen=True)
class StrategyBytes:
    """Bytes of one strategy: in an arena with static offsets, and under other allocators."""

    strategy: str
    bytes: int
    live_bytes: int  # the most that lives at once: no arena is smaller
    tagged_bytes: int  # in buffers that are passed on whole
    pooled_bytes: int  # in a pool that knows no future
    recomputed: int  # ops that run again

    @property
    def fragmentation(self) -> float:
        """The share of the pool that is lost to gaps when most of it is in use."""
        return 1 - self.live_bytes / self.pooled_bytes if self.pooled_bytes else 0.0


def compare_strategies(joint: Joint) -> tuple[StrategyBytes, ...]:
    """Compare strategies: none, in place, sharing, both, both without cheap results, and with √n segments."""
    stages = Stages(joint)
    order = order_of(joint, plain(joint, stages)).without_kept()
    apart = sum(order.bytes)
    merged = sum(life.bytes for life in lives_in_place(order))
    usages = [
        StrategyBytes("none", apart, apart, apart, apart, 0),
        StrategyBytes("in place", merged, merged, merged, merged, 0),
        _usage("sharing", [lives(order)], 0),
        _usage("in place and sharing", _both(order), 0),
    ]
    for name, program in (
        ("+ cheap results again", without_cheap(joint, stages)),
        ("+ √n segments", sqrt_without_cheap(joint, stages)),
    ):
        usages.append(_usage(name, _both(order_of(joint, program).without_kept()), program.recomputed))
    return tuple(usages)


def plain(joint: Joint, stages: Stages | None = None) -> Program:
    """The program that keeps everything, for the engine."""
    stages = stages or Stages(joint)
    return program_of(stages, keep_all(_chain(stages)))


def without_cheap(joint: Joint, stages: Stages | None = None) -> Program:
    """The program that keeps everything but cheap results."""
    stages = stages or Stages(joint)
    return program_of(stages, keep_all(_chain(stages)).lightly())


def sqrt_without_cheap(joint: Joint, stages: Stages | None = None) -> Program:
    """The program of √n segments, which keep no cheap results when recomputed."""
    stages = stages or Stages(joint)
    chain = _chain(stages)
    return program_of(stages, sqrt(replace(chain, saved_bytes=chain.light_bytes)).lightly())


def _chain(stages: Stages) -> Chain:
    return stages.chain(lambda node: 1.0)


def _both(order: Order) -> list[list[Life]]:
    """Write in place only where it helps: a result in its input's place cannot move elsewhere."""
    return [lives_in_place(order), lives(order)]


def _usage(name: str, ways: Sequence[Sequence[Life]], recomputed: int) -> StrategyBytes:
    live = min(map(peak_bytes, ways))
    placed = arena(ways[0]).bytes
    if placed > live:
        placed = min(arena(way).bytes for way in ways)
    tagged, pooled = min(share(way).bytes for way in ways), min(pool(way).bytes for way in ways)
    return StrategyBytes(name, placed, live, tagged, pooled, recomputed)
