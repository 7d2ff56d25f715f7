"""The smallest budget is exact, and segments end where they may."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from lowtide.chains import Chain, OptimalSchedules, Schedule, keep_all, recursive
from lowtide.chains.needs import Needs, Smallest
from lowtide.errors import LowtideError
from tests.refusals import refused

from ..soak import count
from .samples import again, peak, random_chain, trees, unnested, without_light
from .search import fastest_of_all


def test_the_smallest_schedule_has_the_smallest_peak_of_any_state_of_memory():
    rng = random.Random(5)
    for _ in range(count(60, soak=300)):
        chain = random_chain(rng, rng.randint(1, 6))
        smallest = Smallest(Needs(chain))
        assert peak(chain, smallest.schedule()) == smallest.peak_bytes
        assert fastest_of_all(chain, smallest.peak_bytes - 1) == math.inf
        assert fastest_of_all(chain, smallest.peak_bytes) < math.inf


def test_the_optimum_is_the_best_of_all_schedules_whose_segments_end_where_they_may():
    rng = random.Random(7)
    for _ in range(count(20, soak=60)):
        stages = rng.randint(2, 6)
        small = without_light(random_chain(rng, stages))
        tails = [rng.randint(0, int(seconds)) for seconds in small.forward_seconds]
        chain = replace(small, tail_seconds=tails, gradient_bytes=small.value_bytes)
        ends = [rng.randint(stage, stages) for stage in range(stages)]
        known = [Schedule(tuple(unnested(tree))) for tree in trees(0, stages - 1, ends)]
        costs = {schedule: (peak(chain, schedule), again(chain, schedule)) for schedule in known}
        plans = OptimalSchedules(chain, segment_ends=ends)
        assert plans.smallest_bytes == min(size for size, _ in costs.values())
        for budget in range(plans.smallest_bytes, peak(chain, keep_all(chain)) + 1):
            seconds = min(seconds for size, seconds in costs.values() if size <= budget)
            assert costs[plans.schedule(budget)][1] == seconds
        assert recursive(chain, ends) in costs


@pytest.mark.parametrize("ends", [[1], [0, 0], [2, 2, 2]])
def test_wrong_ends_of_segments_are_refused(ends: list[int]):
    with refused("segment_ends", kind=LowtideError):
        Needs(Chain.uniform(2), ends)
