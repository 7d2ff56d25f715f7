"""Cheap results made again: those of elementwise ops, norms, poolings and concatenations that backward waits for.

Of convolution, norm and activation, the convolution's result is kept, and the other two are made again from it right
before backward reads them (Chen et al., 2016, section 4.2).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import fx

from lowtide.chains import Kind as Step
from lowtide.chains import Operation, Schedule
from lowtide.planning.in_place import is_elementwise
from lowtide.planning.program import Cell, Instruction, Kind, Program
from lowtide.planning.stages import Stages
from lowtide.planning.writer import Writer, inputs_of
from lowtide.tracing.joint import Joint, bytes_of, is_item, is_random

_LONGEST = 8  # ops that run again for one result; else all sums of a residual network would be made from the first
_SMALL = 0.02  # of the largest result: not worth it
_CHEAP = frozenset((
    "aten::_native_batch_norm_legit_functional", "aten::_native_batch_norm_legit", "aten::native_batch_norm",
    "aten::native_layer_norm", "aten::native_group_norm", "aten::cat", "aten::constant_pad_nd",
    "aten::max_pool2d_with_indices", "aten::max_pool3d_with_indices", "aten::avg_pool2d", "aten::avg_pool3d",
    "aten::_adaptive_avg_pool2d", "aten::_adaptive_avg_pool3d",
))  # fmt: skip


def drop_cheap(stages: Stages, schedule: Schedule) -> Program:
    """The program of a schedule in which stages that keep everything keep no cheap results, but make them again."""
    return _CheapWriter(stages, schedule).program()


def cheap_results(stages: Stages) -> frozenset[fx.Node]:
    """What is dropped: large cheap results that backward reads, and whose sources are there anyway at that time."""
    return frozenset(_Choice(stages).dropped)


class _CheapWriter(Writer):
    """Writes the schedule's program, but before an op of backward the runs of what it reads and was dropped."""

    def __init__(self, stages: Stages, schedule: Schedule) -> None:
        super().__init__(stages, schedule)
        self.choice = _Choice(stages)
        self.whole: set[int] = set()  # stages that keep everything now
        self.stale: set[fx.Node] = set()  # dropped: what was made of it is no longer to be read
        self.fresh: set[fx.Node] = set()  # made again, on the way to what was dropped
        self.rest = self._noted(self.rest)

    def _kept(self) -> list[Cell]:
        for step in self.sweep:
            self._note(step)
        gone = {self.now[node] for node in self.stale}
        return [cell for cell in super()._kept() if cell not in gone]

    def _noted(self, steps: Iterable[Operation]) -> Iterator[Operation]:
        for step in steps:
            self._note(step)
            yield step

    def _prepare(self, node: fx.Node, prepared: set[fx.Node]) -> Iterator[Instruction]:
        yield from self._remade([value for value in self.stages.read_by(node) if value in self.stale])
        yield from super()._prepare(node, prepared)

    def _note(self, step: Operation) -> None:
        if step.kind is Step.BACKWARD:
            return
        mine = self.choice.dropped.intersection(self.stages.forward[step.stage])
        self.stale -= mine
        self.fresh.difference_update(self.stages.forward[step.stage])
        if step.kind is Step.EVERYTHING:
            self.whole.add(step.stage)
            self.stale |= {node for node in mine if self.choice.stages_of[node] <= self.whole}
        else:
            self.whole.discard(step.stage)
        if step.kind is Step.CHECKPOINT:
            self.stale -= self.stages.inputs[step.stage]  # the stage will run again from it

    def _remade(self, waiting: list[fx.Node]) -> Iterator[Instruction]:
        while waiting:
            node = waiting[-1]
            missing = [] if self._is_there(node) else [v for v in _sources(self.joint, node) if not self._is_there(v)]
            waiting += missing
            if not missing:
                waiting.pop()
                if not self._is_there(node):
                    self.stale.discard(node)
                    self.fresh.add(node)
                    yield self._run(node, Kind.RECOMPUTE)

    def _is_there(self, node: fx.Node) -> bool:
        return node in self.fresh or (node in self.choice.last and node not in self.stale)


class _Choice:
    """Goes through the forward pass, and weighs what each cheap result would take to be made again, and until when."""

    def __init__(self, stages: Stages) -> None:
        self.joint, self.stages = stages.joint, stages
        self.first: dict[fx.Node, int] = {}  # where backward reads a result first
        self.last: dict[fx.Node, int] = {}
        for position, node in enumerate(node for nodes in reversed(stages.backward) for node in nodes):
            for value in stages.read_by(node):
                self.first.setdefault(value, position)
                self.last[value] = position
        self.dropped: set[fx.Node] = set()
        self.until: dict[fx.Node, float] = {}  # the last time at which a result could be made again
        self.cost: dict[fx.Node, int] = {}  # by how many ops
        self.stages_of: dict[fx.Node, set[int]] = {}  # and of which stages
        made = (bytes_of(node) for node in self.joint.forward if self.joint.storages[node] is node)
        large = _SMALL * max(made, default=0)
        for node in self.joint.forward:
            if self._is_cheap(node) and self._can_be_made_again(node):
                late = self.first.get(node)
                if late is not None and bytes_of(node) > large and self.until[node] >= late:
                    self.dropped.add(node)

    def _can_be_made_again(self, node: fx.Node) -> bool:
        sources = _sources(self.joint, node)
        until = min((self._there(value) for value in sources), default=float("inf"))
        again = [v for v in sources if v in self.cost and (v in self.dropped or self.last.get(v, -1) < until)]
        cost = sum(self.cost[value] for value in again)
        cost += not is_item(node) and self.joint.storages[node] is node
        if until < 0 or cost > _LONGEST:
            return False
        self.until[node], self.cost[node] = until, cost
        self.stages_of[node] = {self.stages.of[node]}.union(*(self.stages_of[value] for value in again))
        return True

    def _there(self, node: fx.Node) -> float:
        """Until when a result is there, or can be."""
        again, kept = self.until.get(node, -1), self.last.get(node, -1)
        return again if node in self.dropped else max(again, kept)

    def _is_cheap(self, node: fx.Node) -> bool:
        """Also what shows the storage of a cheap result, such as a view, and one of several."""
        if is_random(node) or node in self.stages.always_kept:
            return False
        if is_item(node) or self.joint.storages[node] is not node:
            return all(value in self.until for value in node.all_input_nodes)
        return bool(node.all_input_nodes) and (is_elementwise(node) or _name(node) in _CHEAP)


def _sources(joint: Joint, node: fx.Node) -> list[fx.Node]:
    """The results of forward ops that an op reads when it runs again."""
    return [value for value in inputs_of(node, again=True) if joint.is_forward(value)]


def _name(node: fx.Node) -> str:
    return getattr(getattr(node.target, "_schema", None), "name", "")
