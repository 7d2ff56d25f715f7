"""A joint graph as a chain of stages, cut where a single value passes.

Such a value is a cut vertex of the graph, so any model has a chain, whatever its modules are. Values that are small
beside it, such as a mask that all layers read, do not count, and are always kept. Very deep models join neighbouring
stages.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from functools import cached_property
from itertools import accumulate

from torch import fx

from lowtide.chains import Chain
from lowtide.planning.programs.rematerialize import CheapResults
from lowtide.tracing.capture.joint import Joint, bytes_of, is_item

_SMALL = 0.05  # of the value that goes on: what goes on beside it may be as large as this together
_MOST = 200  # stages: more are joined with their neighbours, since schedules take O(n³) to find


class Stages:
    """Ops of each stage, forward and backward, and the values between stages."""

    def __init__(self, joint: Joint, is_free: Callable[[fx.Node], bool] = lambda _: False) -> None:
        self.joint = joint
        self._is_free = is_free
        # A value that backward does not read is overwritten, as a sum before a ReLU is: cut behind the ReLU.
        read = _read_by_backward(joint)
        cuts = [(position, value) for position, value in _cuts(joint) if value in read]
        self._divide(cuts)
        # A stage whose backward does nothing needs no recomputation: it becomes part of the next.
        cuts = [cut for cut, backward in zip(cuts, self.backward, strict=False) if backward]
        self._divide(cuts if len(cuts) < _MOST else _fewer(joint, cuts))

    def _divide(self, cuts: list[tuple[int, fx.Node]]) -> None:
        ends = [position + 1 for position, _ in cuts] + [len(self.joint.forward)]
        starts = [0, *ends[:-1]]
        self.forward = [self.joint.forward[start:end] for start, end in zip(starts, ends, strict=True)]
        self.given = [value for _, value in cuts]  # by each stage but the last, to the next
        self.of = {node: stage for stage, nodes in enumerate(self.forward) for node in nodes}
        self.backward: list[list[fx.Node]] = [[] for _ in self.forward]
        self.reads: list[set[fx.Node]] = [set() for _ in self.forward]  # of forward's results, by each stage's backward
        self._share_out_backward()

    def __len__(self) -> int:
        return len(self.forward)

    @cached_property
    def always_kept(self) -> frozenset[fx.Node]:
        """Results read beyond the next stage, and copies of inputs that the step overwrites."""
        far = set(self.joint.copies)
        for gradient in self.joint.prepared.intersection(self.joint.gradients):  # zeros like a result, say
            far |= self.read_by(gradient)
        for stage in range(len(self)):
            read = {value for node in self.forward[stage] for value in node.all_input_nodes} | self.reads[stage]
            far |= {value for value in read if self.joint.is_forward(value) and not self._is_near(value, stage)}
        return frozenset(far)

    @cached_property
    def cheap(self) -> CheapResults:
        """Results that lightly kept stages recompute."""
        return CheapResults(self)

    @cached_property
    def free(self) -> frozenset[fx.Node]:
        """Cheap results that no stage keeps: recomputing them costs nothing."""
        return frozenset(filter(self._is_free, self.cheap.dropped))

    @cached_property
    def inputs(self) -> list[frozenset[fx.Node]]:
        """Results through which each stage reads the value of the stage before."""
        inputs: list[frozenset[fx.Node]] = [frozenset()]
        for stage in range(1, len(self)):
            read = {value for node in self.forward[stage] for value in node.all_input_nodes} | self.reads[stage]
            inputs.append(frozenset(v for v in read if self.of.get(v) == stage - 1 and v not in self.always_kept))
        return inputs

    def kept_by(self, stage: int) -> set[fx.Node]:
        """Results of a stage that its backward reads."""
        return {value for value in self.reads[stage] if self.of[value] == stage}

    def chain(self, seconds: Callable[[fx.Node], float]) -> Chain:
        """Build the chain, with bytes of stages and seconds from each op's."""
        given = [1, *(bytes_of(value) for value in self.given), 1]  # the batch and the loss live anyway
        saved = [self._saved(stage, self.free) for stage in range(len(self))]
        light = [self._saved(stage, self.cheap.dropped) for stage in range(len(self))]
        forward, backward = ([sum(map(seconds, nodes)) for nodes in stages] for stages in (self.forward, self.backward))
        return Chain(forward, backward, given, saved, light_bytes=light)

    def _saved(self, stage: int, dropped: Set[fx.Node]) -> int:
        """Bytes that a stage keeps: results that backward reads, without dropped ones, and its output."""
        storages = {self.joint.storages[value] for value in self.kept_by(stage) - self.always_kept - dropped}
        storages |= set(self.given[stage : stage + 1])
        return max(1, sum(bytes_of(storage) for storage in storages if self.joint.is_forward(storage)))

    def read_by(self, node: fx.Node) -> set[fx.Node]:
        """Forward results that a backward op reads, directly or through prepared values."""
        results: set[fx.Node] = set()
        waiting = list(node.all_input_nodes)
        while waiting:
            value = waiting.pop()
            if self.joint.is_forward(value):
                results.add(value)
            elif value in self.joint.prepared:
                waiting += value.all_input_nodes
        return results

    def _share_out_backward(self) -> None:
        """Assign backward ops to stages, from last to first: an op belongs to the stage whose results it reads."""
        stage = len(self) - 1
        for node in self.joint.backward:
            if node in self.joint.prepared:
                continue
            values = self.read_by(node)
            for value in values.difference(self.joint.copies):
                maker = self.of[value]
                stage = min(stage, maker + 1 if self._is_given(value, maker) else maker)
            self.backward[stage].append(node)
            self.reads[stage] |= values

    def _is_given(self, value: fx.Node, stage: int) -> bool:
        return stage < len(self.given) and self.joint.storages[value] is self.given[stage]

    def _is_near(self, value: fx.Node, stage: int) -> bool:
        maker = self.of[value]
        return maker == stage or (maker == stage - 1 and self._is_given(value, maker))


def _read_by_backward(joint: Joint) -> set[fx.Node]:
    return {joint.storages[value] for node in joint.backward for value in node.all_input_nodes}


def _fewer(joint: Joint, cuts: list[tuple[int, fx.Node]]) -> list[tuple[int, fx.Node]]:
    """Fewer cuts, with about as many bytes of results between any two."""
    total = list(accumulate(bytes_of(node) if joint.storages[node] is node else 0 for node in joint.forward))
    parts = [total[position] * (_MOST - 1) // total[-1] for position, _ in cuts]
    return [cut for cut, part, before in zip(cuts, parts, [0, *parts], strict=False) if part > before]


def _cuts(joint: Joint) -> list[tuple[int, fx.Node]]:
    """Ops after which a single storage passes, and that storage; for each storage the first such op."""
    last: dict[fx.Node, int] = {}
    for position, node in enumerate(joint.forward):
        for value in node.all_input_nodes:
            last[joint.storages[value]] = position
    live: dict[fx.Node, int] = {}
    cuts: dict[fx.Node, int] = {}
    following = [*joint.forward[1:], None]
    for position, (node, after) in enumerate(zip(joint.forward, following, strict=True)):
        storage = joint.storages[node]
        if joint.is_forward(storage) and bytes_of(storage):
            live[storage] = bytes_of(storage)
        live = {storage: size for storage, size in live.items() if last.get(storage, -1) > position}
        if not live or after is None or is_item(after):
            continue
        largest = max(live, key=lambda storage: live[storage])
        if sum(live.values()) <= (1 + _SMALL) * live[largest]:
            cuts.setdefault(largest, position)
    return sorted((position, storage) for storage, position in cuts.items())
