"""Candidate programs over a joint graph, and the fastest of them that fits a budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property

from torch import fx

from lowtide.chains import Chain, OptimalSchedules, Schedule, keep_all
from lowtide.chains import simulate as simulate_chain
from lowtide.errors import BudgetError
from lowtide.planning.programs.chain_costs import complete_chain
from lowtide.planning.programs.program import Program, simulate
from lowtide.planning.programs.stages import Stages
from lowtide.planning.programs.writer import program_of
from lowtide.sizes import format_size
from lowtide.tracing.capture.joint import Joint, bytes_of

_STEPS = 40  # how finely the memory of a chain is gone through


class CandidatePrograms:
    """Programs of a joint graph's optimal schedules, from the fastest to the smallest.

    A chain counts bytes stage by stage, a program counts all live bytes. The chain is therefore solved at many budgets
    of its own. They depend on the chain alone, so a larger user budget has the same candidates.
    """

    def __init__(
        self, joint: Joint, seconds: Callable[[fx.Node], float], workspace: Callable[[fx.Node], int] = lambda _: 0
    ) -> None:
        self.joint = joint
        self.stages = Stages(joint)
        self.chain: Chain = complete_chain(self.stages, seconds, workspace)
        self._programs: dict[Schedule, Program] = {}

    @cached_property
    def schedules(self) -> tuple[Schedule, ...]:
        """Distinct schedules, the fastest first.

        Includes schedules without lightly kept stages. If a stage's input is itself a cheap result, it is recomputed
        one stage earlier than the chain counts.
        """
        whole = keep_all(self.chain)
        high = simulate_chain(self.chain, whole).peak_bytes
        found = {whole: None}
        heavy = replace(self.chain, light_bytes=self.chain.saved_bytes, light_seconds=(), light_temporary_bytes=())
        for chain in (self.chain, heavy) if self.chain.light_bytes != self.chain.saved_bytes else (self.chain,):
            plans = OptimalSchedules(chain)
            low = plans.smallest_bytes
            sizes = [low + (high - low) * step**2 // _STEPS**2 for step in range(_STEPS)]  # close by where little helps
            found |= dict.fromkeys(map(plans.schedule, reversed(sizes)))
        return tuple(sorted(found, key=self.seconds_again))

    def program(self, schedule: Schedule) -> Program:
        """The program of a schedule."""
        if schedule not in self._programs:
            self._programs[schedule] = program_of(self.stages, schedule)
        return self._programs[schedule]

    def seconds_again(self, schedule: Schedule) -> float:
        """Seconds of recomputation."""
        return schedule.forward_seconds(self.chain) - sum(self.chain.forward_seconds)

    def __iter__(self) -> Iterator[Program]:
        return map(self.program, self.schedules)


def fastest_program(
    joint: Joint, budget_bytes: int, *, seconds: Callable[[fx.Node], float] = bytes_of, or_smallest: bool = False
) -> Program:
    """Find the fastest program whose peak, above parameters, inputs and gradients, is within ``budget_bytes``.

    By default the seconds of ops go by the bytes that they make. Where nothing fits it raises ``BudgetError`` with the
    smallest budget, or gives the smallest program.
    """
    peaks: dict[int, Program] = {}
    for program in CandidatePrograms(joint, seconds):
        peak = simulate(program).peak_bytes
        if peak <= budget_bytes:
            return program
        peaks.setdefault(peak, program)
    smallest = min(peaks)
    if or_smallest:
        return peaks[smallest]
    raise BudgetError(
        f"{format_size(budget_bytes)} is below the smallest program of these stages "
        f"({format_size(smallest)}, {smallest} bytes)"
    )
