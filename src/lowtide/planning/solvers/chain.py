"""The chain solver: optimal schedules of a joint graph's stages, written as programs."""

from __future__ import annotations

from dataclasses import replace

from lowtide.chains import Chain, OptimalSchedules, Schedule, explain, keep_all, simulate
from lowtide.planning.plan import PlannedStage
from lowtide.planning.programs.chain_costs import complete_chain
from lowtide.planning.programs.chain_order import program_of
from lowtide.planning.programs.stages import Stages
from lowtide.planning.solvers.outline import outline
from lowtide.planning.solvers.solver import Problem, Solution

_STEPS = 40  # budgets at which a chain is solved


class ChainSolver:
    """Solves the chain of a graph's stages exactly, at many budgets of its own.

    A chain counts bytes stage by stage, a program counts all live bytes. The budgets depend on the chain alone, so a
    larger user budget has the same programs to choose from.
    """

    name = "chain"

    def solve(self, problem: Problem) -> list[Solution]:
        """Programs of distinct schedules, the fastest first."""
        stages = Stages(problem.joint, problem.is_free)
        chain = complete_chain(stages, problem.seconds, problem.workspace)
        if not problem.holds_gradients:
            chain = replace(chain, left_bytes=[0] * len(stages))
        return sorted((_solution(stages, chain, each) for each in schedules(chain)), key=lambda each: each.seconds)


def _solution(stages: Stages, chain: Chain, schedule: Schedule) -> Solution:
    return Solution(
        solver=ChainSolver.name,
        label=str(schedule),
        seconds=schedule.forward_seconds(chain) - sum(chain.forward_seconds),
        estimate_bytes=simulate(chain, schedule).peak_bytes,
        write=lambda: program_of(stages, schedule),
        explain=lambda: tuple(
            PlannedStage(outline(stages.forward[each.stage]), each) for each in explain(chain, schedule)
        ),
    )


def schedules(chain: Chain) -> list[Schedule]:
    """Distinct optimal schedules, with and without lightly kept stages.

    If a stage's input is itself a cheap result, it is recomputed one stage earlier than the chain counts.
    """
    whole = keep_all(chain)
    high = simulate(chain, whole).peak_bytes
    distinct = {whole: None}
    heavy = replace(chain, light_bytes=chain.saved_bytes, light_seconds=(), light_temporary_bytes=())
    for each in (chain, heavy) if chain.light_bytes != chain.saved_bytes else (chain,):
        plans = OptimalSchedules(each)
        low = plans.smallest_bytes
        sizes = [low + (high - low) * step**2 // _STEPS**2 for step in range(_STEPS)]  # close by where little helps
        distinct |= dict.fromkeys(map(plans.schedule, reversed(sizes)))
    return list(distinct)
