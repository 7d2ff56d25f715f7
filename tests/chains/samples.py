"""Chains to plan for, and what a schedule of one takes."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from lowtide.chains import Chain, Schedule, simulate


@st.composite
def chains(draw, most=12, scale=10**6):
    """Chains of any sizes; gradients as large as their values or smaller."""
    n = draw(st.integers(1, most))
    size = st.integers(0, draw(st.sampled_from([4, 60, scale])))

    def sizes(count):
        return draw(st.lists(size, min_size=count, max_size=count))

    def seconds():
        return draw(st.lists(st.floats(0, 10) | st.integers(0, 3), min_size=n, max_size=n))

    values = sizes(n + 1)
    saved = [value + more for value, more in zip(values[1:], sizes(n), strict=True)]
    gradients = draw(st.sampled_from([values, [value // 2 for value in values], [0, *values[1:]]]))
    none = [0] * n
    temporary = draw(st.booleans())
    chain = Chain(
        seconds(), seconds(), values, saved, sizes(n) if temporary else none, sizes(n) if temporary else none, gradients
    )
    if not draw(st.booleans()):
        return chain
    light = [draw(st.integers(value, most)) for value, most in zip(values[1:], saved, strict=True)]
    return replace(
        chain,
        light_bytes=light,
        light_seconds=seconds(),
        light_temporary_bytes=sizes(n),
        passing_temporary_bytes=sizes(n),
        left_bytes=sizes(n),
    )


def random_chain(rng: random.Random, stages: int) -> Chain:
    """Small whole sizes and seconds, so that everything is exact."""

    def pick(low, high, count=stages):
        return [rng.randint(low, high) for _ in range(count)]

    values = pick(0, 7, stages + 1)
    temporary = rng.choice([0, 5])
    saved = [value + more for value, more in zip(values[1:], pick(0, 9), strict=True)]
    chain = Chain(
        pick(0, 5),
        pick(0, 5),
        values,
        saved,
        pick(0, temporary),
        pick(0, temporary),
        rng.choice([values, [rng.randint(0, value) for value in values]]),
    )
    if rng.random() < 0.5:
        return chain
    light = [rng.randint(value, most) for value, most in zip(values[1:], saved, strict=True)]
    return replace(
        chain,
        light_bytes=light,
        light_seconds=pick(0, 3),
        light_temporary_bytes=pick(-3, 2 * temporary),
        passing_temporary_bytes=pick(0, 9),
        left_bytes=pick(0, 4),
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
    """Seconds of running stages again."""
    return simulate(chain, schedule).seconds - sum(chain.backward_seconds) - sum(chain.forward_seconds)


def peak(chain: Chain, schedule: Schedule) -> int:
    return simulate(chain, schedule).peak_bytes
