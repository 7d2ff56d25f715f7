"""A profiled model's chains of blocks as one chain of stages, for which schedules are found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lowtide.chains import Chain, Schedule, Tree, nested
from lowtide.techniques.block_chains import BlockChains, BlockStorages, leaves, split

_MOST = 96  # stages of blocks: more are joined with their neighbours, since schedules take O(n³) to find


@dataclass(frozen=True, slots=True)
class BlockStage:
    """Blocks of a container that stay together; none for what runs between chains, which is always kept."""

    container: str = ""
    positions: tuple[int, ...] = ()
    blocks: tuple[int, ...] = ()  # their numbers in ``BlockChains.blocks``
    group: int = -1  # stages of one group can be in one segment


class BlockStages:
    """All chains of a model, and the ops between them, in the order of the step: one chain for one budget.

    Its bytes are the profiled step's. Values read beyond the next stage, as over a U-Net's skips, are not counted: all
    schedules keep them.
    """

    def __init__(self, chains: BlockChains) -> None:
        self.chains = chains
        self.graph = chains.profile.graph
        self.stages = self._stages()

    @property
    def segment_ends(self) -> list[int]:
        """For each stage, one past the last that can be in one segment with it as the first; itself if always kept."""
        ends: list[int] = []
        for index, stage in reversed(list(enumerate(self.stages))):
            following = self.stages[index + 1 : index + 2]
            joined = stage.group >= 0 and [s.group for s in following] == [stage.group]
            ends.append(ends[-1] if joined else index + (stage.group >= 0))
        return ends[::-1]

    def trees(self, schedule: Schedule) -> dict[str, Tree]:
        """Segments that each container recomputes when it runs its stages of a schedule."""
        blocks = [stage.positions for stage in self.stages]
        trees: dict[str, list[Tree]] = {}
        for node in nested(schedule):
            if not isinstance(node, int):
                container = self.stages[next(leaves(node))].container
                trees.setdefault(container, []).append(in_blocks(node, blocks))
        return {
            container: tuple(sorted(nodes, key=lambda node: next(leaves(node)))) for container, nodes in trees.items()
        }

    def _stages(self) -> list[BlockStage]:
        """Blocks in the order in which they run, with a stage wherever other ops run between."""
        blocks = self._units()
        order = {number: i for i, stage in enumerate(blocks) for number in stage.blocks}
        gaps: set[int] = set()  # after which stage of blocks; -1 for before the first
        reached = -1
        for op, number in zip(self.graph.ops, self.chains.block_of_op, strict=True):
            if op.phase == "forward":
                if number in order:
                    reached = max(reached, order[number])
                else:
                    gaps.add(reached)
        stages = [BlockStage()] if -1 in gaps else []
        for i, stage in enumerate(blocks):
            stages += [stage, BlockStage()] if i in gaps else [stage]
        return stages

    def _units(self) -> list[BlockStage]:
        stages: list[BlockStage] = []
        group = 0
        share = _MOST / max(len(self.chains.blocks), _MOST)
        for chain in self.chains.chains:
            number = {block.position: block.number for block in chain.blocks}
            units = chain.units
            if chain.joined and share < 1 and units:
                cuts = split([len(unit) for unit in units], max(1, round(len(units) * share)))
                units = [tuple(i for unit in units[low:high] for i in unit) for low, high in cuts]
            before = -1
            for unit in units:
                group += not chain.joined or unit[0] != before + 1
                stages.append(BlockStage(chain.container, unit, tuple(number[i] for i in unit), group))
                before = unit[-1]
            group += 1
        blocks = self.chains.blocks
        return sorted(stages, key=lambda stage: min(blocks[number].first for number in stage.blocks))

    @cached_property
    def stage_of_op(self) -> list[int]:
        """Stage of each op, -1 for the optimizer's. Ops between stages of blocks belong to the stage there."""
        at = {number: i for i, stage in enumerate(self.stages) for number in stage.blocks}
        free = [stage.group < 0 for stage in self.stages]
        stages: list[int] = []
        forward, backward = -1, len(free)
        for op, number in zip(self.graph.ops, self.chains.block_of_op, strict=True):
            if op.phase == "forward":
                forward = max(forward, at.get(number, -1))
                between = forward + (forward + 1 < len(free) and free[forward + 1])
                stages.append(at.get(number, max(between, 0)))
            elif op.phase == "backward":
                backward = min(backward, at.get(number, len(free)))
                between = backward - (backward > 0 and (free[backward - 1] or backward == len(free)))
                stages.append(at.get(number, between))
            else:
                stages.append(-1)
        return stages

    @cached_property
    def chain(self) -> Chain:
        """The stages in bytes and seconds."""
        graph, count = self.graph, len(self.stages)
        storages = BlockStorages(graph, self.stage_of_op)
        handed = (storages.low == storages.maker) & (storages.high == storages.maker + 1)
        own = storages.saved & (storages.low == storages.maker) & (storages.high == storages.maker)
        value = np.bincount(storages.maker[handed], storages.bytes[handed], count).astype(np.int64)
        saved = value + np.bincount(storages.maker[own], storages.bytes[own], count).astype(np.int64)
        values = np.append(0, value)
        # One past the op that makes the last that a stage's backward reads: stages that run again stop there. Where
        # there is none, recomputing it frees nothing.
        stop = np.zeros(count, np.int64)
        np.maximum.at(stop, storages.maker[own], storages.written[own] + 1)
        stop[stop == 0] = graph.phase_starts().get("backward", len(graph.ops))
        dropped = np.zeros(len(storages.bytes), np.bool_)  # none of them
        running = np.array([storages.peak_while_running(i, i + 1, int(stop[i]), dropped) for i in range(count)])
        inside = np.array([op.workspace_bytes for op in graph.ops], np.int64)
        gradients = graph.live_bytes("gradient", "temporary") + inside + self._held(storages, handed | own)
        return Chain(
            forward_seconds=self._seconds("forward"),
            backward_seconds=self._seconds("backward"),
            value_bytes=values.tolist(),
            saved_bytes=saved.tolist(),
            forward_temporary_bytes=np.maximum(running - saved + self._most("forward", inside), 0).tolist(),
            backward_temporary_bytes=np.maximum(
                self._most("backward", gradients) - saved - values[1:] - values[:-1], 0
            ).tolist(),
            tail_seconds=self._seconds("forward", stop),
        )

    def _held(self, storages: BlockStorages, which: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Bytes of its own stage's storages that are alive while each op of the backward pass runs."""
        held = np.zeros(len(self.graph.ops), np.int64)
        backward, stage_of_op = self._ops("backward")
        for stage in range(len(self.stages)):
            ops = backward[stage_of_op == stage]
            mine = np.flatnonzero(which & (storages.maker == stage))
            mine = mine[np.argsort(storages.death[mine])]
            left = np.append(np.cumsum(storages.bytes[mine][::-1])[::-1], 0)
            held[ops] = left[np.searchsorted(storages.death[mine], ops, side="right")]
        return held

    def _most(self, phase: str, live: NDArray[np.int64]) -> NDArray[np.int64]:
        """The most of some bytes while ops of each stage run."""
        ops, stages = self._ops(phase)
        most = np.zeros(len(self.stages), np.int64)
        np.maximum.at(most, stages, live[ops])
        return most

    def _seconds(self, phase: str, start: NDArray[np.int64] | None = None) -> list[float]:
        """Seconds of each stage's ops, or of those from ``start`` on; all ops count the same where they are unknown."""
        ops, stages = self._ops(phase)
        took = np.nan_to_num(np.array([self.graph.ops[i].seconds for i in ops], float), nan=1e-6)
        if start is not None:
            took[ops < start[stages]] = 0.0
        return np.bincount(stages, took, len(self.stages)).tolist()

    def _ops(self, phase: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Ops of a phase, and the stage of each."""
        ops = [op.index for op in self.graph.ops if op.phase == phase]
        return np.array(ops, np.int64), np.array([self.stage_of_op[i] for i in ops], np.int64)


def in_blocks(tree: Tree, stages: Sequence[tuple[int, ...]]) -> Tree:
    """A tree of stages as one of the blocks that each stage is.

    >>> in_blocks(((0, 1), 2), [(0,), (1, 2), (3, 4)])
    ((0, 1, 2), 3, 4)
    """
    inside: list[int | Tree] = []
    for node in tree:
        inside += stages[node] if isinstance(node, int) else (in_blocks(node, stages),)
    return tuple(inside)
