"""Reasons for which a schedule keeps or recomputes the saved values of each stage."""

from __future__ import annotations

from bisect import bisect
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lowtide.chains.chain import Chain
from lowtide.chains.schedule import Action, Operation, Schedule, simulate
from lowtide.sizes import format_seconds, format_size


@dataclass(frozen=True, slots=True)
class StageChoice:
    """One stage's choice: its saved values are kept from the first run on, or some or all are recomputed."""

    stage: int
    runs: int  # forward
    saved_bytes: int
    seconds_again: float  # of all runs after the first, and of cheap results
    peak_bytes_if_kept: int  # of the schedule, had they been kept from the first run on
    cheap_bytes: int = 0  # of cheap results, which are recomputed

    @property
    def kept(self) -> bool:
        return self.runs == 1

    def why(self, budget_bytes: int) -> str:
        """Say bytes against seconds.

        >>> StageChoice(0, 3, 4096, 0.002, 9000).why(8192)
        'recomputed 2 times, 2.00 ms; keeping its 4.00 KiB would peak at 8.79 KiB, over 8.00 KiB'
        """
        size, seconds = format_size(self.saved_bytes), format_seconds(self.seconds_again)
        if self.kept:
            cheap = (
                f" except {format_size(self.cheap_bytes)}, cheap to recompute, {seconds}" if self.cheap_bytes else ""
            )
            return f"keeps its {size}{cheap}"
        times = "once" if self.runs == 2 else f"{self.runs - 1} times"
        peak, budget = format_size(self.peak_bytes_if_kept), format_size(budget_bytes)
        over = "over" if self.peak_bytes_if_kept > budget_bytes else "within"
        return f"recomputed {times}, {seconds}; keeping its {size} would peak at {peak}, {over} {budget}"


def explain(chain: Chain, schedule: Schedule) -> tuple[StageChoice, ...]:
    """Give the choice for each stage.

    >>> chain = Chain.uniform(3, saved_bytes=4)
    >>> for choice in explain(chain, Schedule.parse("F1c, F2e, F3e, B3, B2, F1e, B1")):
    ...     print(choice.stage + 1, choice.why(budget_bytes=12))
    1 recomputed once, 1.00 s; keeping its 4 B would peak at 15 B, over 12 B
    2 keeps its 4 B
    3 keeps its 4 B
    """
    during = simulate(chain, schedule).during_bytes
    peak = int(during.max())
    places = _OperationPlaces(schedule)
    light = {op.stage for op in schedule.operations if op.kind is Action.LIGHT}
    choices: list[StageChoice] = []
    for stage, runs in enumerate(schedule.runs):
        seconds = (runs - 1) * chain.forward_seconds[stage] - (stage in schedule.stopped) * chain.tail_seconds[stage]
        seconds += chain.light_seconds[stage] if stage in light else 0.0
        cheap = chain.saved_bytes[stage] - chain.light_bytes[stage] if stage in light else 0
        most = max(peak, _most_if_kept(chain, stage, places, during))
        choices.append(StageChoice(stage, runs, chain.saved_bytes[stage], seconds, most, cheap))
    return tuple(choices)


class _OperationPlaces:
    """The places of a schedule's operations, and so the lifetimes of values."""

    def __init__(self, schedule: Schedule) -> None:
        self._of: dict[Operation, list[int]] = {}
        for place, op in enumerate(schedule.operations):
            self._of.setdefault(op, []).append(place)

    def of(self, stage: int, *kinds: Action) -> list[int]:
        return sorted(place for kind in kinds for place in self._of.get(Operation(kind, stage), []))

    def copies(self, value: int) -> list[tuple[int, int]]:
        """The lifetimes of a value by itself, apart from a stage's saved values."""
        ends = self.of(value, Action.NOTHING, Action.BACKWARD)
        starts = self.of(value - 1, Action.CHECKPOINT, Action.NOTHING)
        return [(place, ends[bisect(ends, place)]) for place in starts]


def _most_if_kept(chain: Chain, stage: int, places: _OperationPlaces, during: NDArray[np.int64]) -> int:
    """The peak from the stage's first run to its last, had the first run kept everything."""
    start = places.of(stage, Action.CHECKPOINT, Action.NOTHING, Action.EVERYTHING, Action.LIGHT)[0]
    end = places.of(stage, Action.EVERYTHING, Action.LIGHT)[0]
    if start == end:
        return 0
    more = np.full(end - start, chain.saved_bytes[stage])
    for born, gone in places.copies(stage + 1):  # saved bytes include the output
        more[born - start : gone - start + 1] -= chain.value_bytes[stage + 1]
    if stage > 0:  # its input would stay too
        more += chain.value_bytes[stage]
        inside = (places.of(stage - 1, Action.EVERYTHING, Action.LIGHT)[0], len(during))
        for born, gone in [*places.copies(stage), inside]:
            more[max(born - start, 0) : max(gone - start + 1, 0)] -= chain.value_bytes[stage]
    return int((during[start:end] + more).max())
