"""Optimal recomputation of chains (Beaumont et al., 2019): the fastest schedule for a budget, as nested checkpoints.

A schedule keeps all of a stretch's first block, or passes over some blocks and keeps only their input. Passing over is
a checkpoint. Blocks inside it run by a plan of their own, to any depth.
Bitwise: the same losses, gradients, buffers and random numbers as without.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import nn

from lowtide import chains
from lowtide.chains import Schedule, keep_all, recursive, simulate
from lowtide.errors import LowtideError
from lowtide.profiling.profile import Profile
from lowtide.techniques.block_chains import BlockChains
from lowtide.techniques.block_stages import BlockStages, in_blocks
from lowtide.techniques.segments import SegmentConfig, SegmentTechnique, apply_tree, sequential_units
from lowtide.techniques.technique import Option
from lowtide.undo import Undo

_BUDGETS = 28
_WORK = 1e8  # of n³ · slots: half a second


def checkpoint_schedule(sequential: nn.Sequential, schedule: Schedule) -> Undo:
    """Run a ``nn.Sequential`` by a schedule of ``lowtide.chains``, as nested checkpoints.

    A block is a stage, together with those behind it that start by writing into their input. The class, the
    parameters and the ``state_dict`` stay; ``undo()`` restores the forward.

    >>> model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    >>> with checkpoint_schedule(model, recursive(chains.Chain.uniform(4))):
    ...     print(model.forward)
    Segments(((0,), 1), (2,), 3)
    """
    units = sequential_units(sequential)
    tree = chains.nested(schedule)
    if len(schedule.runs) != len(units):
        raise LowtideError(
            f"A schedule of {len(schedule.runs)} stages does not fit {len(units)} blocks",
            hint="Blocks that start by writing into their input count with the one before.",
        )
    return apply_tree(sequential, in_blocks(tree, units), path="")


class Optimal(SegmentTechnique):
    """The fastest recomputation for some bytes, over all chains of blocks of a model.

    Several chains share one budget. They are one chain in the order in which they run; ops between them are stages that
    are always kept. A segment stays inside its container. The model's own code calls the blocks of a ``nn.ModuleList``,
    so each is a segment by itself.
    """

    name = "optimal"
    conflicts: Mapping[str, str] = {"sqrt": "each says for all blocks which run again"}

    def options(self, profile: Profile) -> list[Option]:
        """The best schedules at budgets from the smallest to where all is kept, and halves of halves."""
        stages = BlockStages(BlockChains.of(profile))
        ends = stages.segment_ends
        if ends == list(range(len(ends))):
            return []
        trees = filter(None, map(stages.trees, _schedules(stages.chain, ends)))
        options = (Option(self.name, tuple(each), SegmentConfig(tuple(each.values()))) for each in trees)
        return list(dict.fromkeys(options))


def _schedules(chain: chains.Chain, ends: list[int]) -> list[Schedule]:
    """From the least memory to the most. Schedules of more than O(n log n) runs save few bytes, and are left out."""
    slots = int(min(500, max(100, _WORK / chain.stages**3)))
    plans = chains.OptimalSchedules(chain, slots, ends)
    halves = recursive(chain, ends)
    most = max(sum(halves.runs), chain.stages * (1 + math.log2(chain.stages)))
    low, high = plans.smallest_bytes, simulate(chain, keep_all(chain)).peak_bytes
    # Closer together where they are small: there a little memory more saves the most time.
    budgets = [low + int((high - low) * (i / _BUDGETS) ** 1.5) for i in range(_BUDGETS)]
    return [halves, *(schedule for schedule in map(plans.schedule, budgets) if sum(schedule.runs) <= most)]
