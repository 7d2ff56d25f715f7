"""Chains to plan for, the bytes and seconds of schedules, and all schedules of nested checkpoints."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from lowtide.chains import Action, Chain, Operation, Schedule, Tree, simulate


@st.composite
def chains(draw, most=12):
    """Chains of any sizes, and of whole or broken seconds."""
    rng, scale = draw(st.randoms(use_true_random=False)), draw(st.sampled_from([4, 60, 10**6]))
    return random_chain(rng, draw(st.integers(1, most)), scale, broken=draw(st.booleans()))


def random_chain(rng: random.Random, stages: int, scale: int = 7, *, broken: bool = False) -> Chain:
    """Small whole sizes and seconds by default, so that everything is exact. No gradient is larger than its value."""

    def pick(low, high, count=stages):
        return [rng.randint(low, high) for _ in range(count)]

    def seconds(high):
        return [second * rng.random() for second in pick(0, high)] if broken else pick(0, high)

    values = pick(0, scale, stages + 1)
    temporary = rng.choice([0, scale])
    saved = [value + more for value, more in zip(values[1:], pick(0, scale), strict=True)]
    gradients = rng.choice([values, [rng.randint(0, value) for value in values]])
    chain = Chain(seconds(5), seconds(5), values, saved, pick(0, temporary), pick(0, temporary), gradients)
    if rng.random() < 0.5:
        return chain
    return replace(
        chain,
        light_bytes=[rng.randint(value, most) for value, most in zip(values[1:], saved, strict=True)],
        light_seconds=seconds(3),
        light_temporary_bytes=pick(-scale // 2, 2 * temporary),
        passing_temporary_bytes=pick(0, scale),
        left_bytes=pick(0, scale // 2),
    )


def without_light(chain: Chain) -> Chain:
    return replace(chain, light_bytes=(), light_seconds=(), light_temporary_bytes=())


def shrinking_chain(stages: int, seed: int = 0) -> Chain:
    """A long chain as of a network: sizes and seconds that differ from stage to stage, in bytes."""
    rng = np.random.default_rng(seed)
    values = (rng.random(stages + 1) * 1e6 + 3e5).astype(int)
    saved = (values[1:] * (1 + 10 * rng.random(stages))).astype(int)
    temporary = (rng.random((2, stages)) * 1e5).astype(int).tolist()
    seconds = rng.random((2, stages)).tolist()
    return Chain(*seconds, values.tolist(), saved.tolist(), *temporary)


def again(chain: Chain, schedule: Schedule) -> float:
    """Seconds of recomputing stages."""
    return simulate(chain, schedule).seconds - sum(chain.backward_seconds) - sum(chain.forward_seconds)


def peak(chain: Chain, schedule: Schedule) -> int:
    return simulate(chain, schedule).peak_bytes


def unnested(tree: Tree) -> list[Operation]:
    """The operations of nested checkpoints, written down by what a checkpoint does."""
    forward: list[Operation] = []
    backward: list[Operation] = []
    for node in tree:
        if isinstance(node, int):
            forward.append(Operation(Action.EVERYTHING, node))
            backward = [Operation(Action.BACKWARD, node), *backward]
        else:
            first, *others = flat(node)
            forward += [
                Operation(Action.CHECKPOINT, first),
                *(Operation(Action.NOTHING, stage) for stage in others),
            ]
            backward = [*unnested(node), *backward]
    return [*forward, *backward]


def flat(node: int | Tree) -> list[int]:
    return [node] if isinstance(node, int) else [stage for child in node for stage in flat(child)]


def trees(first: int, last: int, ends: list[int]) -> list[Tree]:
    """All ways to run stages ``first`` to ``last`` with segments that end by ``ends``."""
    if first == last:
        return [(first,)]
    ways = [(first, *rest) for rest in trees(first + 1, last, ends)]
    for at in range(first + 1, min(last, ends[first]) + 1):
        ways += [(inner, *rest) for inner in trees(first, at - 1, ends) for rest in trees(at, last, ends)]
    return ways
