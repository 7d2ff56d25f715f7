"""Schedules of chains fit to the byte; the optimal one is what a search finds; a larger budget is never slower."""

from __future__ import annotations

import heapq
import math
import os
import random
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lowtide.chains import (
    Chain,
    Kind,
    Operation,
    Optimal,
    Schedule,
    Tree,
    explain,
    keep_all,
    nested,
    optimal,
    recursive,
    simulate,
    sqrt,
)
from lowtide.chains.schedule import Way, unroll
from lowtide.errors import BudgetError, LowtideError, PlanError

SOAK = bool(os.environ.get("LOWTIDE_SOAK"))

# seeds/002, "Rotor". The slide gives no sizes; its loss is between the last forward and the first backward.
DOCUMENT = "F1c, F2n, F3n, F4e, F5e, F6e, Loss, B_Loss, B6, B5, B4, F1c, F2n, F3e, B3, F1e, F2e, B2, B1"


# -- chains ----------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (([], [], [1], []), "at least one stage"),
        (([1, 1], [1], [1, 1, 1], [1, 1]), "backward_seconds of a chain of 2 stages has 2 numbers, not 1"),
        (([1, 1], [1, 1], [1, 1], [1, 1]), "value_bytes of a chain of 2 stages has 3 numbers, not 2"),
        (([1], [1], [1, 1], [1], [0, 0]), "forward_temporary_bytes of a chain of 1 stages has 1 numbers, not 2"),
        (([1, -1], [1, 1], [1, 1, 1], [1, 1]), "forward_seconds\\[1\\] is -1"),
        (([1], [math.nan], [1, 1], [1]), "backward_seconds\\[0\\] is nan"),
        (([1], [1], [1, math.inf], [1]), "value_bytes\\[1\\] is inf"),
        (([1], [1], [1, 1.5], [2]), "value_bytes\\[1\\] is 1.5, not a whole number of bytes"),
        (([1], [1], [1, 1], [1], [0], [0], [1, 1], [2]), "tail_seconds\\[0\\] is 2.0, more than the 1.0"),
        (([1], [1], [1, 4], [3]), "saved_bytes\\[0\\] is 3, less than the stage's output of 4 bytes"),
    ],
)
def test_a_chain_that_makes_no_sense_is_refused(fields, said):
    with pytest.raises(LowtideError, match=said):
        Chain(*fields)


def test_a_chain_takes_arrays_and_fills_in_what_is_left_out():
    chain = Chain(np.ones(2), np.ones(2), np.array([3, 2, 1]), np.array([4, 1]))
    assert chain.value_bytes == chain.gradient_bytes == (3, 2, 1)
    assert chain.forward_temporary_bytes == (0, 0)
    assert chain == Chain([1, 1], [1, 1], [3, 2, 1], [4, 1])


# -- schedules and the simulator -------------------------------------------------------------------------


def test_schedules_read_and_print_as_in_the_document():
    text = "F1c, F2n, F3e, B3, F1e, F2e, B2, B1"
    schedule = Schedule.parse(text)
    assert str(schedule) == text
    assert schedule.operations[1] == Operation(Kind.NOTHING, 1)
    assert schedule.runs == (2, 2, 1)
    for wrong in ("F1x", "B1e", "F0e", "", "Loss"):
        with pytest.raises(PlanError, match="is not an operation"):
            Schedule.parse(wrong)


def test_the_simulator_counts_what_is_there_by_hand():
    # value 0: 2 B, value 1: 3 B, value 2: 5 B; stage 1 saves 7 B, stage 2 saves 11 B; gradients as their values.
    chain = Chain([1, 10], [100, 1000], [2, 3, 5], [7, 11], [13, 17], [19, 23])
    found = simulate(chain, Schedule.parse("F1c, F2e, B2, F1e, B1"))
    during = [2 + 3 + 13, 2 + 3 + 11 + 17, 2 + 3 + 11 + (5 + 3) + 23, 2 + 3 + 7 + 13, 2 + 7 + (3 + 2) + 19]
    assert found.during_bytes.tolist() == during
    assert found.live_bytes.tolist() == [2 + 3, 2 + 3 + 11, 2 + 3, 2 + 3 + 7, 2 + 2]
    assert (found.peak_bytes, found.peak_operation) == (47, 2)
    assert found.seconds == 1 + 10 + 1000 + 1 + 100


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("F2e", "F2e cannot run as operation 1: its input, the output of stage 1, is not there"),
        ("F1c, F2n, F2e", "F2e cannot run as operation 3: its input"),
        ("F1c, F1e", "F1e cannot run as operation 2: its result is there already"),
        ("F1e, F2e, F3e, B2", "the gradient there is that of stage 3's output"),
        ("F1c, F2c, F3e, B3, B2", "what it needs of its forward is not kept"),
        ("F1n", "its input is not its own to let go"),
        ("F1e, F2n", "its input is not its own to let go"),
        ("F1e, F2e, F3e, B3, B2", "ends before the backward of stage 1"),
        ("F1e, F2e, F3e, F4e", "the chain has 3 stages"),
        ("F1c, F2e", "ends before the backward of stage 3"),
    ],
)
def test_the_simulator_refuses_what_cannot_run(text, said):
    with pytest.raises(PlanError, match=said):
        simulate(Chain.uniform(3), Schedule.parse(text))


# -- schedules by rule -----------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
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


# -- the optimal schedule --------------------------------------------------------------------------------


def test_the_documents_sequence_comes_out():
    # Equal stages cannot give it: where stages 4 to 6 fit beside value 3, so do stages 1 to 3, and nothing of those
    # would run a third time. A chain that shrinks, as convolutional networks do, gives it.
    chain = Chain([1] * 6, [1] * 6, [2, 2, 2, 2, 2, 1, 1], [3, 3, 3, 3, 2, 1])
    expected = DOCUMENT.replace("Loss, B_Loss, ", "")
    assert str(optimal(chain, budget_bytes=12)) == expected
    assert peak(chain, Schedule.parse(expected)) == 12
    assert again(chain, Schedule.parse(expected)) == fastest_of_all(chain, 12) == 5


def test_the_optimum_is_that_of_a_search_over_all_states():
    rng = random.Random(4)
    for _ in range(1000):
        chain = random_chain(rng, rng.randint(1, 8))
        planner = Optimal(chain)
        budget = rng.randint(planner.smallest_bytes, peak(chain, keep_all(chain)))
        schedule = planner.schedule(budget)
        assert peak(chain, schedule) <= budget
        assert again(chain, schedule) == fastest_of_all(chain, budget), (chain, budget)


def test_no_state_of_memory_is_below_the_smallest_budget():
    rng = random.Random(5)
    for _ in range(300):
        chain = random_chain(rng, rng.randint(1, 6))
        smallest = Optimal(chain).smallest_bytes
        assert fastest_of_all(chain, smallest - 1) == math.inf
        assert fastest_of_all(chain, smallest) < math.inf


def test_giving_up_what_was_kept_can_be_faster():
    """The optimum is one of persistent schedules: this is where they lose."""
    chain = Chain([1] * 3, [1] * 3, [2, 1, 3, 3], [1, 3, 5])
    assert again(chain, optimal(chain, 16)) == fastest_of_all(chain, 16) == 2
    assert fastest_of_all(chain, 16, persistent=False) == 1  # F1c, F2e, F3e without value 1, B3, F1e, B2, B1


@settings(max_examples=500 if SOAK else 50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(chain=chains(), slots=st.integers(1, 100), data=st.data())
def test_a_budget_is_kept_and_a_larger_one_is_never_slower(chain, slots, data):
    planner = Optimal(chain, slots)
    least, most = planner.smallest_bytes, peak(chain, keep_all(chain))
    outside = chain.value_bytes[0]
    edges = [(most - outside) // 4**k + outside + d for k in range(4) for d in (-1, 0, 1)]  # where grids change
    drawn = data.draw(st.lists(st.integers(least, most), max_size=30))
    seconds = {}
    for budget in (least, most, most + 1, *drawn, *(edge for edge in edges if edge >= least)):
        found = simulate(chain, planner.schedule(budget))
        assert found.peak_bytes <= budget
        seconds[budget] = found.seconds
    ordered = [seconds[budget] for budget in sorted(seconds)]
    assert ordered == sorted(ordered, reverse=True)
    assert seconds[most] == simulate(chain, keep_all(chain)).seconds
    with pytest.raises(BudgetError, match=rf"smallest schedule of this chain.*\b{least} bytes"):
        planner.schedule(least - 1)


def test_rules_are_never_better_than_the_optimum():
    rng = random.Random(6)
    for _ in range(50):
        chain = random_chain(rng, rng.randint(2, 30))
        for rule in (sqrt, recursive):
            schedule = rule(chain)
            assert again(chain, optimal(chain, peak(chain, schedule))) <= again(chain, schedule)


def test_few_slots_come_close_to_many():
    chain = shrinking_chain(40)
    fine, coarse = Optimal(chain, 4000), Optimal(chain, 250)
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
    with pytest.raises(LowtideError, match="at least one slot"):
        optimal(Chain.uniform(3), 5, slots=0)


# -- why -------------------------------------------------------------------------------------------------


def test_explain_says_what_keeping_would_have_taken():
    chain = Chain([0.001] * 3, [1] * 3, [10, 10, 10, 10], [40, 40, 40])
    choices = explain(chain, Schedule.parse("F1c, F2n, F3e, B3, F1e, F2e, B2, B1"))
    assert [choice.runs for choice in choices] == [2, 2, 1]
    assert [choice.kept for choice in choices] == [False, False, True]
    assert [choice.seconds_again for choice in choices] == [0.001, 0.001, 0]
    # At B2 there are value 0, what stages 1 and 2 saved, and two gradients: 110. At B3 value 0, value 2, what stage 3
    # saved and two gradients, 80: with what stage 1 saves 120; with what stage 2 saves beside value 2 and value 1 120.
    assert [choice.peak_bytes_if_kept for choice in choices] == [120, 120, 110]
    why = "Runs 1 more time, 1 ms: keeping its 40 B too would peak at 120 B, over 110 B"
    assert choices[0].why(budget_bytes=110) == why
    assert choices[2].why(budget_bytes=110) == "Its 40 B are kept"


def test_what_the_optimum_runs_again_would_not_have_fitted():
    rng = random.Random(7)
    for _ in range(200):
        chain = random_chain(rng, rng.randint(2, 12))
        planner = Optimal(chain)
        budget = rng.randint(planner.smallest_bytes, peak(chain, keep_all(chain)))
        for choice in explain(chain, planner.schedule(budget)):
            if choice.kept or chain.forward_seconds[choice.stage] == 0:
                assert choice.runs >= 1
            else:
                assert choice.peak_bytes_if_kept > budget


# -- a search that knows nothing of the planners ---------------------------------------------------------


def fastest_of_all(chain: Chain, budget: int, *, persistent: bool = True) -> float:
    """Seconds of running stages again in the fastest schedule that fits; infinity if there is none.

    Dijkstra's search. A state is how far backward has come, which values are there, which of them may not go, of which
    stages everything is saved, and of which of them lightly. In persistent schedules what was kept stays until its
    backward; in others it may go at any time. Every stage must run with everything saved once: only what is more than
    that costs.
    """
    n, f = chain.stages, chain.forward_seconds
    a, saved_bytes, gradient = chain.value_bytes, chain.saved_bytes, chain.gradient_bytes
    light_bytes, light_seconds = chain.light_bytes, chain.light_seconds
    start = (n, 1, 1, 0, 0)
    best = {start: 0.0}
    queue = [(0.0, start, a[0])]
    while queue:
        cost, state, live = heapq.heappop(queue)
        if cost > best[state]:
            continue
        g, values, fixed, saved, light = state
        if g == 0:
            return cost
        moves = []  # (state, bytes after, bytes during, seconds)
        for i in range(g):
            plain = values >> i & 1
            if not plain and not (i and saved >> (i - 1) & 1):
                continue
            kept = fixed | (1 << i) if persistent and plain else fixed
            if not saved >> i & 1:
                for lightly, size, extra in ((0, saved_bytes[i], 0.0), (1 << i, light_bytes[i], light_seconds[i])):
                    more = live + size
                    after = (g, values, kept, saved | 1 << i, light | lightly)
                    moves.append((after, more, more + chain.forward_temporary_bytes[i], extra))
                if i + 1 < g and not values >> (i + 1) & 1:
                    more, now = live + a[i + 1], values | 1 << (i + 1)
                    during = more + chain.passing_temporary_bytes[i]
                    moves.append(((g, now, kept, saved, light), more, during, f[i]))
                    if i and plain and not fixed >> i & 1:
                        moves.append(((g, now ^ 1 << i, fixed, saved, light), more - a[i], during, f[i]))
            elif i == g - 1:
                more = live + gradient[i] + (gradient[n] if g == n else 0)
                lightly = light >> i & 1
                less = (light_bytes if lightly else saved_bytes)[i] + gradient[i + 1] + (a[i] if i and plain else 0)
                less += a[g] if values >> g & 1 else 0  # of no more use
                mask = 1 | ((1 << i) - 1)
                after = (i, values & mask, fixed & mask, saved ^ 1 << i, light & ~(1 << i))
                more += chain.left_bytes[i]
                temporary = (chain.light_temporary_bytes if lightly else chain.backward_temporary_bytes)[i]
                moves.append((after, more - less, more + temporary, 0.0))
        if not persistent:
            for i in range(g):
                if i and values >> i & 1:
                    moves.append(((g, values ^ 1 << i, fixed, saved, light), live - a[i], 0, 0.0))
                if saved >> i & 1:  # to be made once more
                    size = (light_bytes if light >> i & 1 else saved_bytes)[i]
                    after = (g, values, fixed, saved ^ 1 << i, light & ~(1 << i))
                    moves.append((after, live - size, 0, f[i]))
        for after, live_after, during, seconds in moves:
            if during <= budget and cost + seconds < best.get(after, math.inf):
                best[after] = cost + seconds
                heapq.heappush(queue, (cost + seconds, after, live_after))
    return math.inf


# -- schedules as nested checkpoints, and where segments may end --------------------------------------------


def unnested(tree: Tree) -> list[Operation]:
    """The operations of nested checkpoints, written down by what a checkpoint does."""
    forward: list[Operation] = []
    backward: list[Operation] = []
    for node in tree:
        if isinstance(node, int):
            forward.append(Operation(Kind.EVERYTHING, node))
            backward = [Operation(Kind.BACKWARD, node), *backward]
        else:
            first, *others = flat(node)
            forward += [Operation(Kind.CHECKPOINT, first), *(Operation(Kind.NOTHING, stage) for stage in others)]
            backward = [*unnested(node), *backward]
    return [*forward, *backward]


def flat(node: int | Tree) -> list[int]:
    return [node] if isinstance(node, int) else [stage for child in node for stage in flat(child)]


def trees(first: int, last: int, ends: list[int]) -> list[Tree]:
    """All ways to run stages ``first`` to ``last`` with segments that end where they may."""
    if first == last:
        return [(first,)]
    found = [(first, *rest) for rest in trees(first + 1, last, ends)]
    for at in range(first + 1, min(last, ends[first]) + 1):
        found += [(inner, *rest) for inner in trees(first, at - 1, ends) for rest in trees(at, last, ends)]
    return found


@given(chain=chains(), share=st.floats(0, 1))
@settings(max_examples=100, deadline=None)
def test_every_schedule_is_its_nested_checkpoints(chain: Chain, share: float):
    chain = without_light(chain)
    plans = Optimal(chain, slots=60)
    most = peak(chain, keep_all(chain))
    budget = plans.smallest_bytes + int(share * (most - plans.smallest_bytes))
    for schedule in (plans.schedule(budget), keep_all(chain), sqrt(chain), recursive(chain)):
        tree = nested(schedule)
        assert flat(tree) == list(range(chain.stages))
        assert tuple(unnested(tree)) == schedule.operations


@pytest.mark.parametrize(
    "text",
    [
        "F1e, F2e, B2",
        "F1e, F2e, B2, B1, B1",
        "F1l, F2e, B2, B1",
        "F1c, F2e, B2, F1n, F1e, B1",
        "F1e, F1e, B1",
        "F1c, F2c, F3e, B3, F1c, F2e, B2, F1e, B1",  # the second checkpoint is let go and made again
    ],
)
def test_a_schedule_that_does_not_nest_is_refused(text: str):
    with pytest.raises(PlanError, match="does not nest"):
        nested(Schedule.parse(text))


def test_segments_end_where_they_may_and_tails_are_left_out_and_the_rest_is_the_best():
    rng = random.Random(7)
    for _ in range(40):
        stages = rng.randint(2, 6)
        small = without_light(random_chain(rng, stages))
        tails = [rng.randint(0, int(seconds)) for seconds in small.forward_seconds]
        chain = replace(small, tail_seconds=tails, gradient_bytes=small.value_bytes)
        ends = [rng.randint(stage, stages) for stage in range(stages)]
        known = [Schedule(tuple(unnested(tree))) for tree in trees(0, stages - 1, ends)]
        plans = Optimal(chain, segment_ends=ends)
        assert plans.smallest_bytes == min(peak(chain, schedule) for schedule in known)
        for budget in range(plans.smallest_bytes, peak(chain, keep_all(chain)) + 1):
            schedule = plans.schedule(budget)
            assert schedule in known
            assert again(chain, schedule) == min(again(chain, s) for s in known if peak(chain, s) <= budget)
        assert recursive(chain, ends) in known


def test_a_tail_is_left_out_by_the_last_stage_that_runs_again_and_by_no_other():
    chain = Chain([4, 4, 4], [0, 0, 0], [1] * 4, [1] * 3, tail_seconds=[1, 2, 3])
    assert again(chain, Schedule.parse("F1c, F2n, F3e, B3, F1e, F2e, B2, B1")) == 4 + 4 - 2
    assert again(chain, Schedule.parse("F1c, F2c, F3e, B3, F2e, B2, F1e, B1")) == 4 - 2 + 4 - 1
    assert again(chain, keep_all(chain)) == 0
    assert [
        choice.seconds_again for choice in explain(chain, Schedule.parse("F1c, F2n, F3e, B3, F1e, F2e, B2, B1"))
    ] == [
        4,
        2,
        0,
    ]


@pytest.mark.parametrize("ends", [[1], [0, 0], [2, 2, 2]])
def test_ends_of_segments_that_make_no_sense_are_refused(ends: list[int]):
    with pytest.raises(LowtideError, match="segment_ends of a chain of 2 stages"):
        Optimal(Chain.uniform(2), segment_ends=ends)
