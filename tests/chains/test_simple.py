"""Schedules by rule run, have the best boundaries, and grow as their laws say."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings

from lowtide.chains import Chain, keep_all, optimal, recursive, simulate, sqrt
from lowtide.chains.schedule import Way, unroll

from ..soak import SOAK, count
from .samples import chains, peak, random_chain


@settings(max_examples=count(50, soak=200), deadline=None)
@given(chain=chains())
def test_rules_give_schedules_that_run(chain):
    plain = simulate(chain, keep_all(chain))
    assert plain.seconds == pytest.approx(sum(chain.forward_seconds) + sum(chain.backward_seconds))
    for rule in (sqrt, recursive):
        assert simulate(chain, rule(chain)).seconds >= plain.seconds
    assert max(sqrt(chain).runs) <= 2  # one more forward pass at most
    assert sqrt(chain).runs[-1] == 1
    assert peak(chain, sqrt(chain)) <= plain.peak_bytes


def test_sqrt_has_the_best_boundaries():
    def segments(cuts, end):
        def decide(first, last, room):
            after = [cut for cut in cuts if cut > first]
            return Way(after[0] if last == end and after else first, 0)

        return unroll(end + 1, 0, decide)

    rng = random.Random(0)
    for _ in range(60):
        chain = random_chain(rng, rng.randint(1, 7))
        n = chain.stages
        cuts = [[j for j in range(1, n) if mask >> j & 1] for mask in range(0, 1 << n, 2)]
        assert peak(chain, sqrt(chain)) == min(peak(chain, segments(c, n - 1)) for c in cuts)


def test_growth_laws():
    depths = [4**k for k in range(1, 6)]
    chains = [Chain.uniform(n) for n in depths]

    def memory(rule):
        return [peak(chain, rule(chain)) for chain in chains]

    def forwards(rule):
        return [sum(rule(chain).runs) for chain in chains]

    for n, kept, root, halves in zip(depths, memory(keep_all), memory(sqrt), memory(recursive), strict=True):
        assert kept == n + 3  # all outputs, the input, and two gradients
        assert root <= math.sqrt(2 * n) + 5
        assert halves <= math.log2(n) + 5
    for n, kept, root, halves in zip(depths, forwards(keep_all), forwards(sqrt), forwards(recursive), strict=True):
        assert kept == n
        assert root <= 2 * n
        assert halves == n + n // 2 * math.log2(n)


def test_a_thousand_stages_need_no_recursion():
    chain = Chain.uniform(1000)
    for rule in (keep_all, sqrt, recursive):
        simulate(chain, rule(chain))
    all_over_again = unroll(1000, 0, lambda first, last, room: Way(last, 0))
    assert sum(all_over_again.runs) == 1000 * 1001 // 2
    if SOAK:
        schedule = optimal(chain, 60, slots=100)
        assert peak(chain, schedule) <= 60
