"""Few-bit codes in the graph solver: a hold for results that backward reads for an activation's derivative alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import fx

from lowtide.compat.dispatch import without_modes
from lowtide.planning.programs.codes import BITS, Codes
from lowtide.planning.solvers.frontier import frontier
from lowtide.planning.solvers.joint_ops import JointOps
from lowtide.planning.solvers.runs import Hold, Ops, RunTimeline
from lowtide.techniques.fewbit import gradient_bound, relative_error

_TARGETS = 18  # peaks at which runs are sought


@dataclass(frozen=True)
class Coded:
    """The ops of a graph with holds for codes; ``codes`` by the store that takes them."""

    ops: Ops
    codes: dict[int, Codes]

    def frontier(self) -> list[RunTimeline]:
        """Timelines that use codes."""
        return [timeline for timeline in frontier(self.ops, targets=_TARGETS, guess=False) if timeline.coded]

    def used(self, timeline: RunTimeline) -> list[Codes]:
        return [self.codes[hold.store] for hold in timeline.coded]


def with_codes(
    kernels: JointOps,
    codes: Sequence[Codes],
    seconds: Callable[[fx.Node], float],
    workspace: Callable[[fx.Node], int],
) -> Coded:
    """The ops with a hold for each of ``codes``."""
    ops = kernels.ops
    number = {node: op for op, node in enumerate(kernels.nodes)}
    last = ops.last_forward_reads
    holds: list[Hold] = []
    taken: dict[int, Codes] = {}
    for each in codes:
        value = kernels.value_of.get(kernels.joint.storages[each.source])
        readers = tuple(number[reader] for reader in each.readers if reader in number)
        if value is None or value in ops.held or not readers or ops.repeatable.intersection(readers):
            continue
        op, store = ops.maker[value], len(ops) + 2 * len(holds)
        stored = len(ops.bytes) + len(holds)
        holds.append(Hold(op, last[op] + 1, store, store + 1, (value,), stored, readers))
        taken[store] = each
    costs = [(_seconds(each, seconds), workspace(each.encode)) for each in taken.values()]
    nothing: list[tuple[int, ...]] = [()] * (2 * len(holds))
    more = replace(
        ops,
        reads=(*ops.reads, *(values for hold in holds for values in (hold.values, ()))),
        makes=(*ops.makes, *(values for hold in holds for values in ((hold.stored,), ()))),
        bytes=(*ops.bytes, *(each.bytes for each in taken.values())),
        seconds=(*ops.seconds, *(each for own, _ in costs for each in (own, 0.0))),
        workspace=(*(ops.workspace or (0,) * len(ops)), *(each for _, own in costs for each in (own, 0))),
        over=(*ops.over, *nothing) if ops.over else (),
        holds=tuple(holds),
    )
    return Coded(more, taken)


def bound_of(codes: Sequence[Codes]) -> float:
    """The largest relative error of a gradient behind these; 0 if all are exact."""
    with without_modes():
        errors = [relative_error(each.book.activation, BITS) for each in codes if not each.is_exact]
    return gradient_bound(max(errors), len(errors)) if errors else 0.0


def _seconds(codes: Codes, seconds: Callable[[fx.Node], float]) -> float:
    """Seconds of taking codes, and of reading them beyond those of the ops that read the result."""
    longer = sum(seconds(decode) - seconds(reader) for reader, decode in codes.decode.items())
    whole = seconds(codes.encode) + max(0.0, longer)
    return whole if math.isfinite(whole) else 0.0
