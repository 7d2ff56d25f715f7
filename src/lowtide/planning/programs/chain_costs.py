"""Temporary bytes of a joint graph's stages beyond the chain's own count, measured on two programs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from torch import fx

from lowtide.chains import Chain, keep_all
from lowtide.planning.programs.chain_order import program_of
from lowtide.planning.programs.program import Cost, Instruction, Kind, Program, Value, simulate
from lowtide.planning.programs.stages import Stages
from lowtide.tracing.capture.joint import bytes_of


def complete_chain(stages: Stages, seconds: Callable[[fx.Node], float], workspace: Callable[[fx.Node], int]) -> Chain:
    """Complete a chain with each stage's temporary bytes and the cost of recomputing cheap results.

    Both are measured on two programs: one keeps everything, the other keeps all stages lightly. They show the bytes
    that live beyond the chain's own count, the bytes that a stage leaves, and the ops that run again.
    """
    chain = stages.chain(seconds)
    reader = _StageBytes(stages, chain, workspace)
    whole, light = program_of(stages, keep_all(chain)), program_of(stages, keep_all(chain).lightly())
    again = np.zeros(len(stages))
    for stage, each in reader.backward(light):
        if each.kind is Kind.RECOMPUTE:
            again[stage] += seconds(stages.joint.nodes[each.value.op])
    forward, backward, left = reader.temporaries(whole)
    return replace(
        chain,
        saved_bytes=np.maximum(reader.kept(whole), chain.value_bytes[1:]).tolist(),
        light_bytes=np.maximum(reader.kept(light), chain.value_bytes[1:]).tolist(),
        forward_temporary_bytes=forward,
        passing_temporary_bytes=reader.passing(),
        backward_temporary_bytes=backward,
        left_bytes=left,
        light_seconds=again.tolist(),
        light_temporary_bytes=reader.temporaries(light)[1],
    )


class _StageBytes:
    """Attribute a program's bytes to its stages."""

    def __init__(self, stages: Stages, chain: Chain, workspace: Callable[[fx.Node], int]) -> None:
        self.stages, self.chain, self.workspace = stages, chain, workspace
        self.backward_of = {node: stage for stage, nodes in enumerate(stages.backward) for node in nodes}

    def forward(self, program: Program) -> Iterator[tuple[int, Instruction]]:
        """Each instruction with its stage."""
        stage = 0
        for each in program.forward:
            if each.kind is Kind.COMPUTE:
                stage = self.stages.of.get(self.stages.joint.nodes[each.value.op], stage)
            yield stage, each

    def backward(self, program: Program) -> list[tuple[int, Instruction]]:
        """Each instruction with its stage: recomputed and prepared values belong to the stage that reads them next."""
        stage, staged = 0, list[tuple[int, Instruction]]()
        for each in reversed(program.backward):
            if each.kind is Kind.COMPUTE:
                stage = self.backward_of.get(self.stages.joint.nodes[each.value.op], stage)
            staged.append((stage, each))
        return staged[::-1]

    def passing(self) -> list[int]:
        """Bytes beyond input and output while a stage runs forward and keeps nothing."""
        joint = self.stages.joint
        last = {joint.storages[value]: node for node in joint.forward for value in node.all_input_nodes}
        ends: dict[fx.Node, list[fx.Node]] = {}
        for storage, node in last.items():
            ends.setdefault(node, []).append(storage)
        values = self.chain.value_bytes
        most, live = [0] * len(self.stages), 0
        for node in joint.forward:
            live += bytes_of(node) if joint.storages[node] is node else 0
            stage = self.stages.of[node]
            most[stage] = max(most[stage], live + self.workspace(node) - values[stage] - values[stage + 1])
            live -= sum(bytes_of(storage) for storage in ends.get(node, ()) if joint.is_forward(storage))
        return most

    def kept(self, program: Program) -> NDArray[np.int64]:
        """Bytes that each stage leaves for its backward."""
        sizes = np.zeros(len(self.stages), np.int64)
        seen: set[Value] = set()
        for cell in program.kept:
            node = self.stages.joint.nodes[cell.op]
            maker = self.stages.joint.storages[node]
            if maker in self.stages.of and node not in self.stages.always_kept and not cell.is_state:
                storages = set(program.held(cell)) - seen
                sizes[self.stages.of[maker]] += sum(program.bytes.get(storage, 0) for storage in storages)
                seen |= storages
        return sizes

    def temporaries(self, program: Program) -> tuple[list[int], list[int], list[int]]:
        """Bytes beyond the chain's count while each stage runs forward and backward, and bytes left after."""
        simulation, first = simulate(program, self._cost), len(program.forward)
        live, within = np.array(simulation.live_bytes), simulation.during_bytes
        saved, gradients = np.cumsum(self.kept(program)), np.array(self.chain.gradient_bytes)
        always = live[first - 1] - saved[-1]
        forward, before = np.zeros((2, len(self.stages)), np.int64)
        for i, (stage, _) in enumerate(self.forward(program)):
            forward[stage] = max(forward[stage], within[i] - saved[stage])
        during: dict[int, int] = {}
        for i, (stage, _) in enumerate(self.backward(program), first):
            if stage not in during and i > first:
                before[stage] = live[i - 1] - saved[stage] - gradients[stage + 1] - always
            during[stage] = max(during.get(stage, 0), within[i])
        held = np.maximum.accumulate(before[::-1])[::-1]  # of gradients, when a stage's backward starts
        left = np.append(max(live[-1], held[0]), held[:-1]) - held
        counted = saved + gradients[:-1] + gradients[1:] + left + held
        backward = [during[stage] - int(size) if stage in during else 0 for stage, size in enumerate(counted)]
        return forward.tolist(), backward, left.tolist()

    def _cost(self, each: Instruction) -> Cost:
        runs = each.kind in (Kind.COMPUTE, Kind.RECOMPUTE) and not each.value.is_state
        return Cost(workspace_bytes=self.workspace(self.stages.joint.nodes[each.value.op])) if runs else Cost()
