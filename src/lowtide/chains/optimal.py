"""The fastest schedule of a chain that fits a budget in bytes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from lowtide.chains.chain import Chain
from lowtide.chains.grid import Grid
from lowtide.chains.needs import Needs
from lowtide.chains.schedule import Schedule
from lowtide.chains.simple import keep_all
from lowtide.chains.smallest import Smallest
from lowtide.errors import BudgetError, LowtideError
from lowtide.sizes import format_size


def optimal(chain: Chain, budget_bytes: int, slots: int = 500) -> Schedule:
    """The fastest schedule whose peak, as ``simulate`` counts it, is at most a budget.

    Fastest among the schedules in which what was kept stays until its backward has used it ("persistent" ones),
    and as far as ``slots`` divide memory finely enough: ``Optimal`` says more, and is what to ask for several budgets
    of one chain. Raises ``BudgetError`` with the smallest possible budget.

    >>> print(optimal(Chain.uniform(4), budget_bytes=6))
    F1e, F2c, F3n, F4e, B4, F2e, F3e, B3, B2, B1
    """
    return OptimalSchedules(chain, slots).schedule(budget_bytes)


class OptimalSchedules:
    """The optimal schedules of a chain, at any budget (Rotor: Beaumont et al., 2019).

    Memory is counted in slots, on grids that depend on the chain alone: one over all that keeping everything takes,
    one over the lowest quarter of it, one over a quarter of that, and so on. Sizes are rounded so that a schedule
    never needs more than its budget. A larger budget has all to choose from that a smaller one has: it is never
    slower. Where a chain has fewer bytes than slots nothing is rounded, and the schedule is the best persistent one (as
    long as no gradient is larger than its value).

    A grid of n stages takes O(n³ · slots) time and 2 · n² · slots bytes. It is made when a budget first needs it:
    for most budgets that is one grid or two.

    ``segment_ends[s]``, if given, is one past the last stage that can be passed over together with stage s, which is
    the first: s itself where everything of s must be kept. Schedules are then the best of those that keep to it.
    """

    def __init__(self, chain: Chain, slots: int = 500, segment_ends: Sequence[int] = ()) -> None:
        if slots < 1:
            raise LowtideError(f"Memory is divided into at least one slot, not {slots}")
        self.chain = chain
        self.slots = slots
        self._needs = Needs(chain, segment_ends)
        self._grids: dict[int, Grid] = {}

    @property
    def smallest_bytes(self) -> int:
        """The smallest budget that can be kept, to the byte."""
        return self._smallest.peak_bytes

    def schedule(self, budget_bytes: int) -> Schedule:
        """The fastest schedule for a budget."""
        room = int(budget_bytes) - self.chain.value_bytes[0]
        if room >= self._needs.whole[0, -1]:
            return keep_all(self.chain)
        if budget_bytes < self.smallest_bytes:
            raise BudgetError(
                f"{format_size(max(budget_bytes, 0))} is below the smallest schedule of this chain of "
                f"{self.chain.stages} stages ({format_size(self.smallest_bytes)}, {self.smallest_bytes} bytes)"
            )
        return min(self._candidates(room), key=self._seconds)

    def _candidates(self, room: int) -> list[Schedule]:
        """The fastest of each grid that counts: of the finest that covers the room, and of those finer still.

        A finer grid can only be better where rounding matters. It is left out when nothing in as few bytes as it
        covers could be as fast as what was found, so that larger budgets still find all that smaller ones do.
        """
        least = self.smallest_bytes - self.chain.value_bytes[0]
        top = int(self._needs.whole[0, -1])
        while top // 4 >= room:
            top //= 4
        found: list[Schedule] = []
        while True:
            best = self._grid(top).fastest(room)
            found += [best] if best else []
            exact = top <= self.slots
            top //= 4
            if exact or (found and min(map(self._seconds, found)) < self._least_seconds(max(top, least))):
                return found
            if top < least:
                return [*found, self._smallest_schedule]

    def _least_seconds(self, room: int) -> float:
        """Less than the forward seconds of any schedule in a room.

        Before the first backward, what is kept of stages fits into the room; the other stages run once more, but for
        their tails. The bound is that of the knapsack in which stages are kept in part, and cheap results cost nothing.
        """
        seconds, saved = np.array(self.chain.forward_seconds), self._needs.light.astype(float)
        again = seconds - self._needs.tails
        order = np.argsort(-again / np.maximum(saved, 1e-9))
        kept = np.clip((room - np.cumsum(saved[order])) / np.maximum(saved[order], 1) + 1, 0, 1)
        return float(seconds.sum() + (again[order] * (1 - kept)).sum()) * (1 - 1e-9)

    def _seconds(self, schedule: Schedule) -> float:
        return schedule.forward_seconds(self.chain)

    def _grid(self, top: int) -> Grid:
        if top not in self._grids:
            self._grids[top] = Grid(self._needs, top, self.slots)
        return self._grids[top]

    @cached_property
    def _smallest(self) -> Smallest:
        return Smallest(self.chain, self._needs)

    @cached_property
    def _smallest_schedule(self) -> Schedule:
        return self._smallest.schedule()
