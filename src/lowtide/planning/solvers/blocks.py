"""The block solver: programs that treat equal blocks of a model alike, for code that is compiled once for each kind.

A block is kept in one of several ways, from all that backward reads down to its inputs alone. Between two ways lie the
results of its costly ops, such as matrix products: each step no longer keeps the one with the fewest seconds for its
bytes. Blocks take steps in the order of that ratio, the first blocks of the model first. So at most one kind of block
is in two ways at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from lowtide.planning.programs.fused import is_fused
from lowtide.planning.solvers.graph import explained
from lowtide.planning.solvers.joint_ops import JointOps
from lowtide.planning.solvers.runs import RunTimeline
from lowtide.planning.solvers.segments import on_demand
from lowtide.planning.solvers.solver import Problem, Solution
from lowtide.tracing.capture.blocks import blocks_of

_FEWEST = 2  # equal blocks that are worth a program of their own
_PROGRAMS = 64  # that are tried, at the most


@dataclass(frozen=True)
class _KeptBlock:
    """A way to keep a block: the ops whose results are recomputed, with the bytes kept and the seconds they cost."""

    recomputed: frozenset[int]
    bytes: int
    seconds: float


@dataclass(frozen=True)
class _NextStep:
    """One block that goes on to its next way."""

    ratio: float  # seconds for each byte
    kind: int
    block: int
    recomputed: frozenset[int]


class BlockSolver:
    """Needs blocks that are alike, as numbered modules of the model."""

    name = "blocks"

    def solve(self, problem: Problem) -> list[Solution]:
        """Programs that keep less and less, the fastest first; none where equal blocks gain nothing."""
        if not problem.prefers_blocks:
            return []
        kernels, ops = problem.kernels, problem.kernels.ops
        kinds = _kinds(kernels)
        if max(map(len, kinds), default=0) < _FEWEST:
            return []
        passed = frozenset(op for blocks in kinds for block in blocks for op in _passed(kernels, block))
        free = frozenset(op for op in range(ops.backward) if problem.is_free(kernels.nodes[op])) - passed
        recomputed = [*_recomputed(kernels, kinds, free)]
        every = -(-len(recomputed) // _PROGRAMS)
        timelines: list[RunTimeline] = []
        for each in dict.fromkeys((*recomputed[::every], recomputed[-1])):
            kept = frozenset(range(ops.backward)) - each
            timelines.append(RunTimeline(ops, on_demand(ops, kept)))
        return [_solution(kernels, timeline) for timeline in timelines]


def _recomputed(
    kernels: JointOps, kinds: Sequence[Sequence[Sequence[int]]], free: Set[int]
) -> Iterator[frozenset[int]]:
    """Sets of ops whose results are not kept, each larger than the one before."""
    steps: list[_NextStep] = []
    now = frozenset(free)
    for kind, blocks in enumerate(kinds):
        ways = _hull(_ways(kernels, blocks[0], free))
        for block in blocks:
            now |= _in_block(block, ways[0], blocks[0])
        for before, after in pairwise(ways):
            ratio = _ratio(before, after)
            steps += (
                _NextStep(ratio, kind, index, _in_block(block, after, blocks[0])) for index, block in enumerate(blocks)
            )
    yield now
    for step in sorted(steps, key=lambda step: (step.ratio, step.kind, step.block)):
        now |= step.recomputed
        yield now


def _in_block(block: Sequence[int], way: _KeptBlock, first: Sequence[int]) -> frozenset[int]:
    """The ops that a way of the first block of a kind recomputes, as ops of another one."""
    return frozenset(op for op, alike in zip(block, first, strict=True) if alike in way.recomputed)


def _kinds(kernels: JointOps) -> list[list[list[int]]]:
    """Blocks that are alike, as lists of their forward ops."""
    block_of = blocks_of(kernels.joint)
    blocks: dict[str, list[int]] = {}
    for op in range(kernels.ops.backward):
        if path := block_of(kernels.nodes[op]):
            blocks.setdefault(path, []).append(op)
    kinds: dict[tuple[object, ...], list[list[int]]] = {}
    for members in blocks.values():
        kinds.setdefault(_outline(kernels, members), []).append(members)
    return list(kinds.values())


def _outline(kernels: JointOps, members: Sequence[int]) -> tuple[object, ...]:
    """Describe the ops of a block. Blocks that compute the same have equal descriptions."""
    place, passed = {op: index for index, op in enumerate(members)}, _passed(kernels, members)
    return tuple(
        (
            str(kernels.nodes[op].target),
            op in passed,
            op in kernels.ops.repeatable,
            tuple(kernels.ops.bytes[value] for value in kernels.ops.makes[op]),
            tuple(place.get(source, -1) for source in kernels.ops.sources[op]),
        )
        for op in members
    )


def _ways(kernels: JointOps, members: Sequence[int], free: Set[int]) -> Iterator[_KeptBlock]:
    """From all that backward reads, without free results, to the inputs alone."""
    ops, own = kernels.ops, set(members)
    changeable = {op for op in own if op in ops.repeatable} - _passed(kernels, members)
    cheap = {op for op in changeable if is_fused(kernels.nodes[op])}
    readers = _read_in_backward(kernels, own)
    recomputed = frozenset(changeable & free)
    yield _way(kernels, own, readers, recomputed)
    recomputed |= cheap
    yield _way(kernels, own, readers, recomputed)
    costly = sorted(changeable - recomputed, key=lambda op: ops.seconds[op] / max(ops.size[op], 1))
    for op in costly:
        recomputed |= {op}
        yield _way(kernels, own, readers, recomputed)


def _passed(kernels: JointOps, members: Sequence[int]) -> set[int]:
    """Ops of a block whose results the forward pass reads outside of it. They are kept, and part the backward pass."""
    ops, own = kernels.ops, set(members)
    outside = (reader for reader in range(members[0], ops.backward) if reader not in own)
    return {source for reader in outside for source in ops.sources[reader] if source in own}


def _read_in_backward(kernels: JointOps, own: Set[int]) -> frozenset[int]:
    ops = kernels.ops
    return frozenset(s for reader in range(ops.backward, len(ops)) for s in ops.sources[reader] if s in own)


def _way(kernels: JointOps, own: Set[int], read: Set[int], recomputed: frozenset[int]) -> _KeptBlock:
    """Bytes that stay until backward, and seconds of what then runs again."""
    ops = kernels.ops
    waiting, needed = list(read), set[int]()
    while waiting:
        op = waiting.pop()
        if op not in needed and op in own:
            needed.add(op)
            waiting += ops.sources[op] if op in recomputed else ()
    again = needed & recomputed
    return _KeptBlock(recomputed, sum(ops.size[op] for op in needed - again), sum(ops.seconds[op] for op in again))


def _hull(ways: Iterator[_KeptBlock]) -> list[_KeptBlock]:
    """Ways with fewer and fewer bytes, each step of which costs more for a byte than the one before."""
    chosen: list[_KeptBlock] = []
    for way in ways:
        while chosen and way.bytes <= chosen[-1].bytes and way.seconds <= chosen[-1].seconds:
            chosen.pop()
        if chosen and way.bytes >= chosen[-1].bytes:
            continue
        while len(chosen) > 1 and _ratio(chosen[-2], way) <= _ratio(chosen[-2], chosen[-1]):
            chosen.pop()
        chosen.append(way)
    return chosen


def _ratio(before: _KeptBlock, after: _KeptBlock) -> float:
    return (after.seconds - before.seconds) / (before.bytes - after.bytes)


def _solution(kernels: JointOps, timeline: RunTimeline) -> Solution:
    runs = sum(map(len, timeline.again.values()))
    return Solution(
        solver=BlockSolver.name,
        label=f"{runs} ops again, {timeline.peak_bytes} bytes",
        seconds=timeline.seconds,
        estimate_bytes=timeline.peak_bytes,
        write=lambda: kernels.program(timeline),
        explain=partial(explained, kernels, timeline),
        treats_blocks_alike=True,
    )
