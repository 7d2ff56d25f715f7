"""Offload beside recomputation: which values wait on the host, and when copies start so that few ops wait for them.

The search for runs takes a load from the host as one more way to have a value again. Its price is a share of the
seconds of its copies, since copies overlap with ops: several shares are tried. Then each copy is placed. A value is
freed when its copy to the host is done, and fetched as early as the peak allows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from lowtide.planning.programs.offloading import CopyClock, HostLink
from lowtide.planning.programs.program import Kind
from lowtide.planning.solvers.frontier import frontier
from lowtide.planning.solvers.runs import Again, Hold, Ops, RunTimeline

# The cost of a copy in the search, as a share of its seconds. The most bytes to offload, as a share of those that the
# link copies during the forward pass. Copies that fit beside the ops are nearly free, others are not.
_TRIALS = ((0.01, 1.0), (0.01, 0.5), (0.1, 1.0), (0.01, 1e3), (0.5, 1e3))  # the first is the only one where it is quick
_TARGETS = 18  # peaks at which runs are sought for each


@dataclass(frozen=True)
class Offloaded:
    """A timeline whose stores and loads stand where values are freed and fetched."""

    timeline: RunTimeline
    seconds: float  # of ops that run again, and of ops that wait for copies
    host_bytes: int = 0


def with_host(ops: Ops, values: Mapping[int, tuple[int, ...]], link: HostLink) -> Ops:
    """The ops with a hold on the host for each op that has ``values`` to offload.

    Where the host cannot hold all, those that take longest to compute for their bytes may go there.
    """
    last = ops.last_forward_reads
    holds: list[Hold] = []
    left = link.budget_bytes
    for op in sorted(values, key=lambda op: -ops.seconds[op] / max(1, ops.size[op])):
        size = sum(ops.bytes[value] for value in values[op])
        if 0 < size <= left:
            left -= size
            number = len(ops) + 2 * len(holds)
            holds.append(Hold(op, last[op] + 1, number, number + 1, values[op], len(ops.bytes) + len(holds)))
    moves = [(hold.values, (hold.stored,)) for hold in holds]
    copies = [link.seconds(sum(ops.bytes[value] for value in hold.values)) for hold in holds]
    none: list[tuple[int, ...]] = [()] * (2 * len(holds))
    return replace(
        ops,
        reads=(*ops.reads, *(each for device, host in moves for each in (device, host))),
        makes=(*ops.makes, *(each for device, host in moves for each in (host, device))),
        bytes=(*ops.bytes, *(0 for _ in holds)),
        seconds=(*ops.seconds, *(seconds for each in copies for seconds in (each, each))),
        workspace=(*ops.workspace, *(0 for _ in none)) if ops.workspace else (),
        over=(*ops.over, *none) if ops.over else (),
        holds=tuple(holds),
    )


def with_offloaded(
    choices: Iterable[Offloaded],
    ops: Ops,
    values: Mapping[int, tuple[int, ...]],
    link: HostLink,
    *,
    thorough: bool = True,
) -> list[Offloaded]:
    """The fastest at each peak, of given timelines and of others that offload ``values`` of ops."""
    best: list[Offloaded] = []
    offered = [*choices, *_frontier(ops, values, link, thorough=thorough)]
    for choice in sorted(offered, key=lambda each: (each.seconds, each.timeline.peak_bytes)):
        if not best or choice.timeline.peak_bytes < best[-1].timeline.peak_bytes:
            best.append(choice)
    return best


def _frontier(
    ops: Ops, values: Mapping[int, tuple[int, ...]], link: HostLink, *, thorough: bool
) -> Iterator[Offloaded]:
    """Timelines that offload, for several prices and amounts of copies."""
    hidden = sum(ops.seconds[: ops.backward]) * link.bandwidth
    for share, amount in _TRIALS if thorough else _TRIALS[:1]:
        hosted = with_host(ops, values, replace(link, budget_bytes=int(min(link.budget_bytes, amount * hidden))))
        copies = (seconds * share for seconds in hosted.seconds[len(ops) :])
        priced = replace(hosted, seconds=(*ops.seconds, *copies))
        for timeline in frontier(priced, targets=_TARGETS, guess=False):
            if any(run in hosted.loads for run in timeline.runs):
                yield placed(RunTimeline(hosted, timeline.again), link)


def placed(timeline: RunTimeline, link: HostLink) -> Offloaded:
    """Place copies within the timeline's peak: free late and fetch early, so that ops wait little."""
    again = _fetched_early(timeline, link)
    again = _freed_late(RunTimeline(timeline.ops, again), timeline.peak_bytes, link)
    following = RunTimeline(timeline.ops, again)
    fit = [each for each in (following, timeline) if each.peak_bytes <= timeline.peak_bytes]
    return min((_timed(each, link) for each in fit), key=lambda choice: choice.seconds)


def _timed(timeline: RunTimeline, link: HostLink) -> Offloaded:
    """Run a timeline beside its copies."""
    ops, clock = timeline.ops, CopyClock(link)
    again = 0.0
    stored = {hold.op: hold for run in timeline.runs if (hold := ops.stores.get(run)) is not None}
    sizes = _sizes(timeline)
    for place, (run, turn) in enumerate(zip(timeline.runs, timeline.before, strict=True)):
        if (hold := ops.stores.get(run)) is not None:
            clock.wait(Kind.OFFLOAD, hold.op)
            continue
        if (hold := ops.loads.get(run)) is not None:
            for value in hold.values:
                if timeline.is_read[value, place]:
                    clock.copy(Kind.FETCH, value, ops.bytes[value])
            continue
        for value in ops.reads[run]:
            clock.wait(Kind.FETCH, value)
        clock.run(ops.seconds[run])
        again += ops.seconds[run] if run != turn else 0.0
        if run == turn and run in stored:
            clock.copy(Kind.OFFLOAD, run, sizes[run])
    return Offloaded(timeline, again + clock.stalled, sum(sizes.values()))


def _sizes(timeline: RunTimeline) -> dict[int, int]:
    """Bytes that wait on the host, by op: of results that are fetched."""
    ops, fetched = timeline.ops, set[int]()
    for place, run in enumerate(timeline.runs):
        if (hold := ops.loads.get(run)) is not None:
            fetched.update(value for value in hold.values if timeline.is_read[value, place])
    sizes: dict[int, int] = {}
    for value in fetched:
        op = ops.maker[value]
        sizes[op] = sizes.get(op, 0) + ops.bytes[value]
    return sizes


def _turns(timeline: RunTimeline) -> Iterator[tuple[int, int, int]]:
    """The ops in order, each with the places of the first run before it and of itself."""
    starts = timeline.starts
    ends = [*starts[1:], len(timeline.runs)]
    yield from zip(range(len(starts)), starts, (end - 1 for end in ends), strict=True)


def _freed_late(timeline: RunTimeline, target: int, link: HostLink) -> Again:
    """Free offloaded values when their copies are done, or when the peak needs their bytes."""
    ops, clock, live = timeline.ops, CopyClock(link), timeline.live
    stored = {hold.op: hold for run in timeline.runs if (hold := ops.stores.get(run)) is not None}
    sizes = _sizes(timeline)
    held_bytes = {op: sum(ops.bytes[value] for value in hold.values) for op, hold in stored.items()}
    waiting: list[Hold] = []  # freed no earlier than here, in the order of their copies
    again = {turn: runs - ops.stores.keys() for turn, runs in timeline.again.items()}
    by_turn: dict[int, list[Hold]] = {}
    for hold in stored.values():
        by_turn.setdefault(hold.turn, []).append(hold)
    for turn, _, place in _turns(timeline):
        waiting = sorted([*waiting, *by_turn.get(turn, ())], key=lambda hold: hold.op)
        still: list[Hold] = []
        for hold in waiting:
            extra = held_bytes[hold.op] + sum(held_bytes[each.op] for each in still)
            done = clock.ends(Kind.OFFLOAD, hold.op) <= clock.now
            if done or turn == ops.backward or int(live[place]) + extra > target:
                clock.wait(Kind.OFFLOAD, hold.op)
                again[turn] = again.get(turn, frozenset()) | {hold.store}
            else:
                still.append(hold)
        waiting = still
        if turn >= ops.backward:
            break
        clock.run(ops.seconds[turn])
        if turn in stored:
            clock.copy(Kind.OFFLOAD, turn, sizes[turn])
    return again


def _fetched_early(timeline: RunTimeline, link: HostLink) -> Again:
    """Fetch values so early that their copies are done when they are read, as far as the peak allows.

    Time runs backwards here: from the end of the step to the last op of the forward pass.
    """
    ops, clock, target = timeline.ops, CopyClock(link), timeline.peak_bytes
    again = {turn: runs - ops.loads.keys() for turn, runs in timeline.again.items()}
    extra = 0  # bytes of values that are fetched earlier than the timeline says
    waiting: list[tuple[int, Hold, int]] = []  # first allowed turn, hold, bytes
    for turn, first, last in reversed(list(_turns(timeline))):
        if turn < ops.backward:
            break
        peak = int(timeline.live[first : last + 1].max())
        still: list[tuple[int, Hold, int]] = []
        for earliest, hold, size in waiting:  # fetched behind this turn, or earlier
            done = clock.ends(Kind.FETCH, hold.op) <= clock.now
            if done or turn < earliest or peak + extra > target:
                clock.wait(Kind.FETCH, hold.op)
                again[turn + 1] = again.get(turn + 1, frozenset()) | {hold.load}
                extra -= size
            else:
                still.append((earliest, hold, size))
        waiting = still
        for place in range(first, last + 1):
            clock.run(0.0 if timeline.runs[place] >= len(ops) else ops.seconds[timeline.runs[place]])
        for place in range(first, last + 1):
            hold = ops.loads.get(timeline.runs[place])
            if hold is not None:
                size = sum(ops.bytes[value] for value in hold.values if timeline.is_read[value, place])
                clock.copy(Kind.FETCH, hold.op, size)
                extra += size
                waiting.append((_free_until(timeline, hold, place), hold, size))
    for _, hold, _ in waiting:
        again[ops.backward] = again.get(ops.backward, frozenset()) | {hold.load}
    return again


def _free_until(timeline: RunTimeline, hold: Hold, place: int) -> int:
    """The first turn at which no earlier run's results of the same op are read any more."""
    last = -1
    for value in hold.values:
        births, deaths = timeline.spans_of[value]
        last = max([last, *(death for birth, death in zip(births, deaths, strict=True) if birth < place)])
    return max(timeline.before[last] + 1, timeline.ops.backward)
