"""The order of backward's ops under a chain's schedule: which stages, cheap results and prepared values run again."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from lowtide.chains import Action as Step
from lowtide.chains import Schedule
from lowtide.planning.programs.program import Kind, Program
from lowtide.planning.programs.rematerialize import LightStages, sources_of
from lowtide.planning.programs.stages import Stages
from lowtide.planning.programs.writer import write


def program_of(stages: Stages, schedule: Schedule) -> Program:
    """The program of a chain's schedule."""
    return write(stages.joint, list(_ChainOrder(stages, schedule).backward()))


class _ChainOrder:
    """Follow a schedule, and track the values that are available."""

    def __init__(self, stages: Stages, schedule: Schedule) -> None:
        self.stages, self.joint = stages, stages.joint
        first = next(i for i, step in enumerate(schedule.operations) if step.kind is Step.BACKWARD)
        self.sweep, self.rest = schedule.operations[:first], schedule.operations[first:]
        self.light = LightStages(stages)
        self.available: set[fx.Node] = set()  # of backward's own results

    def backward(self) -> Iterator[tuple[fx.Node, Kind]]:
        """Ops of the backward pass in order, with recomputed ones."""
        for step in self.sweep:
            self.light.note(step)
        for step in self.rest:
            self.light.note(step)
            if step.kind is Step.BACKWARD:
                yield from self._stage(step.stage)
            else:
                for node in self.stages.forward[step.stage]:
                    if node not in self.joint.copies:  # their sources have changed
                        yield node, Kind.RECOMPUTE
        for node in self.joint.gradients:
            if isinstance(node, fx.Node) and node in self.joint.prepared and node not in self.available:
                yield from self._prepare_all([node], set())

    def _stage(self, stage: int) -> Iterator[tuple[fx.Node, Kind]]:
        prepared: set[fx.Node] = set()
        for node in self.stages.backward[stage]:
            yield from self._prepare(node, prepared)
            yield node, Kind.COMPUTE
        self.available -= prepared  # computed from results that another run may replace

    def _prepare(self, node: fx.Node, prepared: set[fx.Node]) -> Iterator[tuple[fx.Node, Kind]]:
        if self.light.stale:
            yield from self._remade([value for value in self.stages.read_by(node) if value in self.light.stale])
        yield from self._prepare_all([v for v in node.all_input_nodes if v in self.joint.prepared], prepared)

    def _remade(self, waiting: list[fx.Node]) -> Iterator[tuple[fx.Node, Kind]]:
        """Recompute freed cheap results and their freed sources."""
        while waiting:
            node = waiting[-1]
            missing = [v for v in sources_of(self.joint, node) if not self.light.is_available(v)]
            if self.light.is_available(node):
                waiting.pop()
            elif missing:
                waiting += missing
            else:
                waiting.pop()
                self.light.recomputed(node)
                yield node, Kind.RECOMPUTE

    def _prepare_all(self, waiting: list[fx.Node], prepared: set[fx.Node]) -> Iterator[tuple[fx.Node, Kind]]:
        while waiting:
            node = waiting[-1]
            missing = [v for v in node.all_input_nodes if v in self.joint.prepared and v not in self.available]
            waiting += missing
            if not missing:
                waiting.pop()
                if node not in self.available:
                    prepared.add(node)
                    self.available.add(node)
                    yield node, Kind.COMPUTE
