"""Offload in the graph solver: never slower than without, within the peak, and never more than the host may hold."""

from __future__ import annotations

import pytest
from benchmarks.shapes import layers

from lowtide import zoo
from lowtide.planning.programs.offloading import HostLink
from lowtide.planning.programs.program import simulate
from lowtide.planning.solvers.frontier import frontier
from lowtide.planning.solvers.offload import Offloaded, placed, with_host, with_offloaded
from lowtide.planning.solvers.runs import Ops, RunTimeline
from lowtide.tracing.capture.loss import capture_joint

from ...soak import count
from ..held import LINK, solutions
from .exhaustive import best_peak, best_seconds, random_ops

FAST = HostLink(bandwidth=1e12, latency=0.0, budget_bytes=2**40)
SLOW = HostLink(bandwidth=2.0, latency=0.1, budget_bytes=2**40)


def values_of(ops: Ops) -> dict[int, tuple[int, ...]]:
    return {op: ops.makes[op] for op in range(ops.backward)}


def hosted(ops: Ops, link: HostLink) -> Ops:
    return with_host(ops, values_of(ops), link)


def choices(ops: Ops, link: HostLink, *, thorough: bool = True) -> list[Offloaded]:
    plain = [Offloaded(timeline, timeline.seconds) for timeline in frontier(ops)]
    return with_offloaded(plain, ops, values_of(ops), link, thorough=thorough)


@pytest.mark.parametrize("link", [FAST, SLOW], ids=["fast", "slow"])
@pytest.mark.parametrize("seed", range(count(6, soak=200)))
def test_no_budget_is_slower_than_the_best_without_offload(seed: int, link: HostLink) -> None:
    ops = random_ops(seed)
    offered = choices(ops, link)
    smallest = best_peak(ops)
    assert offered[-1].timeline.peak_bytes <= smallest
    for budget in range(smallest, offered[0].timeline.peak_bytes, 2):
        fastest = next(choice for choice in offered if choice.timeline.peak_bytes <= budget)
        best = best_seconds(ops, budget)
        assert best is not None
        assert fastest.seconds <= best + 1e-9


def test_a_quick_search_shows_what_offloading_would_give() -> None:
    ops, link = layers(40), HostLink(1000.0, 0.0, 2**40)
    quick, thorough = (choices(ops, link, thorough=each) for each in (False, True))
    assert any(choice.host_bytes for choice in quick)
    for budget in (choice.timeline.peak_bytes for choice in quick):
        seconds, best = (next(c.seconds for c in each if c.timeline.peak_bytes <= budget) for each in (quick, thorough))
        assert best <= seconds


def test_copies_that_take_no_time_replace_all_recomputation() -> None:
    ops = layers(40)
    assert any(choice.seconds for choice in choices(ops, HostLink(1.0, 100.0, 2**40)))
    assert max(choice.seconds for choice in choices(ops, FAST)) < 1e-3 * sum(ops.seconds)


def waiting(timeline: RunTimeline) -> float:
    """Seconds of ops that run again, and of all copies one by one."""
    ops, reads = timeline.ops, timeline.is_read
    seconds = sum(ops.seconds[run] for run, stage in zip(timeline.runs, timeline.before, strict=True)
                  if run != stage and run < len(ops))  # fmt: skip
    fetched = [
        v for place, run in enumerate(timeline.runs) if run in ops.loads for v in ops.makes[run] if reads[v, place]
    ]
    return seconds + sum(SLOW.seconds(ops.bytes[value]) for value in (*fetched, *set(fetched)))


@pytest.mark.parametrize("seed", range(8))
def test_placing_copies_shortens_waits_within_the_peak(seed: int) -> None:
    ops = hosted(random_ops(seed, forward=8), SLOW)
    for timeline in frontier(ops, targets=9):
        if any(run in ops.loads for run in timeline.runs):
            after = placed(timeline, SLOW)
            assert after.timeline.peak_bytes <= timeline.peak_bytes
            loads = [run for run in timeline.runs if run in ops.loads]
            assert sorted(run for run in after.timeline.runs if run in ops.loads) == sorted(loads)
            assert after.seconds <= waiting(timeline)


def test_the_host_holds_no_more_than_its_budget() -> None:
    joint = capture_joint(zoo.small("unet"))
    whole = max(solution.host_bytes for solution in solutions(joint))
    limit = whole // 2
    limited = solutions(joint, HostLink(LINK.bandwidth, LINK.latency, limit))
    used = [max(simulate(solution.program).host_bytes) for solution in limited]
    assert 0 < max(used) <= limit
    assert used == [solution.host_bytes for solution in limited]


def test_a_value_that_no_op_can_recompute_may_wait_on_the_host() -> None:
    ops = random_ops(3)
    fixed = Ops(ops.reads, ops.makes, ops.bytes, ops.seconds, ops.backward, repeatable=frozenset())
    plain = RunTimeline(fixed, {}).peak_bytes
    assert choices(fixed, FAST)[-1].timeline.peak_bytes < plain
