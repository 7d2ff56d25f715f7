"""The optimal schedule is that of a search; budgets are kept to the byte; a larger one is never slower."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lowtide.chains import Chain, OptimalSchedules, Schedule, keep_all, optimal, recursive, simulate, sqrt
from lowtide.errors import BudgetError
from tests.refusals import refused

from ..soak import count
from .samples import again, chains, peak, random_chain, shrinking_chain
from .search import fastest_of_all

# seeds/002, "Rotor". The slide gives no sizes; its loss is between the last forward and the first backward.
DOCUMENT = "F1c, F2n, F3n, F4e, F5e, F6e, Loss, B_Loss, B6, B5, B4, F1c, F2n, F3e, B3, F1e, F2e, B2, B1"


def test_the_documents_sequence_comes_out():
    # Equal stages cannot give it. Where stages 4 to 6 fit beside value 3, so do stages 1 to 3, and none of these would
    # run a third time. A chain that shrinks, as convolutional networks do, gives it.
    chain = Chain([1] * 6, [1] * 6, [2, 2, 2, 2, 2, 1, 1], [3, 3, 3, 3, 2, 1])
    expected = DOCUMENT.replace("Loss, B_Loss, ", "")
    assert str(optimal(chain, budget_bytes=12)) == expected
    assert peak(chain, Schedule.parse(expected)) == 12
    assert again(chain, Schedule.parse(expected)) == fastest_of_all(chain, 12) == 5


def test_the_optimum_is_that_of_a_search_over_all_states():
    rng = random.Random(4)
    for _ in range(count(150, soak=1000)):
        chain = random_chain(rng, rng.randint(1, 8))
        planner = OptimalSchedules(chain)
        budget = rng.randint(planner.smallest_bytes, peak(chain, keep_all(chain)))
        schedule = planner.schedule(budget)
        assert peak(chain, schedule) <= budget
        assert again(chain, schedule) == fastest_of_all(chain, budget), (chain, budget)


def test_freeing_a_kept_value_early_can_be_faster():
    """The optimum is one of persistent schedules: this is where they lose."""
    chain = Chain([1] * 3, [1] * 3, [2, 1, 3, 3], [1, 3, 5])
    assert again(chain, optimal(chain, 16)) == fastest_of_all(chain, 16) == 2
    assert fastest_of_all(chain, 16, persistent=False) == 1  # F1c, F2e, F3e without value 1, B3, F1e, B2, B1


@settings(max_examples=count(20, soak=500), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(chain=chains(), slots=st.integers(1, 100), data=st.data())
def test_a_budget_is_kept_and_a_larger_one_is_never_slower(chain, slots, data):
    planner = OptimalSchedules(chain, slots)
    least, most = planner.smallest_bytes, peak(chain, keep_all(chain))
    outside = chain.value_bytes[0]
    edges = [(most - outside) // 4**k + outside + d for k in range(4) for d in (-1, 0, 1)]  # where grids change
    drawn = data.draw(st.lists(st.integers(least, most), max_size=30))
    seconds = {}
    for budget in (least, most, most + 1, *drawn, *(edge for edge in edges if edge >= least)):
        result = simulate(chain, planner.schedule(budget))
        assert result.peak_bytes <= budget
        seconds[budget] = result.seconds
    ordered = [seconds[budget] for budget in sorted(seconds)]
    assert ordered == sorted(ordered, reverse=True)
    assert seconds[most] == simulate(chain, keep_all(chain)).seconds
    with pytest.raises(BudgetError) as refused:
        planner.schedule(least - 1)
    assert refused.value.smallest_bytes == least


def test_rules_are_never_better_than_the_optimum():
    rng = random.Random(6)
    for _ in range(count(20, soak=50)):
        chain = random_chain(rng, rng.randint(2, 30))
        for rule in (sqrt, recursive):
            schedule = rule(chain)
            assert again(chain, optimal(chain, peak(chain, schedule))) <= again(chain, schedule)


def test_few_slots_come_close_to_many():
    chain = shrinking_chain(40)
    fine, coarse = OptimalSchedules(chain, 4000), OptimalSchedules(chain, 250)
    most = peak(chain, keep_all(chain))
    forward = sum(chain.forward_seconds)
    for share in (0.9, 0.7, 0.5, 0.3, 0.2, 0.15):
        seconds = [again(chain, planner.schedule(int(share * most))) / forward for planner in (fine, coarse)]
        assert seconds[1] <= seconds[0] + 0.04


def test_two_hundred_stages_take_less_than_five_seconds():
    chain = shrinking_chain(200)
    budget = peak(chain, keep_all(chain)) // 2
    start = time.process_time()
    schedule = optimal(chain, budget, slots=500)
    assert time.process_time() - start < 5
    assert peak(chain, schedule) <= budget
    assert again(chain, schedule) < 0.25 * sum(chain.forward_seconds)


def test_slots_are_counted_from_one():
    with refused("slot", "0"):
        optimal(Chain.uniform(3), 5, slots=0)
