"""Cheap results: saved values of elementwise ops, norms, poolings and concatenations.

After a convolution, a norm and an activation, only the convolution's result is kept. The other two are recomputed from
it right before backward reads them (Chen et al., 2016, section 4.2).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import fx

from lowtide.chains import Action as Step
from lowtide.chains import Operation
from lowtide.compat.operators import name_of
from lowtide.planning.programs.in_place import is_elementwise
from lowtide.tracing.capture.batchnorm import inputs_of
from lowtide.tracing.capture.joint import Joint, bytes_of, is_item, is_random

if TYPE_CHECKING:
    from lowtide.planning.programs.stages import Stages

_LONGEST = 8  # recomputed ops for one result; else all sums of a residual network would start from the first
_SMALL = 0.02  # of the largest result: not worth it
_CHEAP = frozenset((
    "aten::_native_batch_norm_legit", "aten::cudnn_batch_norm", "aten::native_batch_norm",
    "aten::native_layer_norm", "aten::native_group_norm", "aten::cat", "aten::constant_pad_nd",
    "aten::max_pool2d_with_indices", "aten::max_pool3d_with_indices", "aten::avg_pool2d", "aten::avg_pool3d",
    "aten::_adaptive_avg_pool2d", "aten::_adaptive_avg_pool3d", "lowtide::dropout_mask",
))  # fmt: skip


class CheapResults:
    """Large cheap results that backward reads and whose sources are available at that time.

    Walks the forward pass, and finds the cost of recomputing each result and the last moment for it.
    """

    def __init__(self, stages: Stages) -> None:
        self.joint, self.stages = stages.joint, stages
        self.first: dict[fx.Node, int] = {}  # where backward reads a result first
        self.last: dict[fx.Node, int] = {}
        for position, node in enumerate(node for nodes in reversed(stages.backward) for node in nodes):
            for value in stages.read_by(node):
                self.first.setdefault(value, position)
                self.last[value] = position
        self.dropped: set[fx.Node] = set()
        self.until: dict[fx.Node, float] = {}  # last backward position at which a result can be recomputed
        self.cost: dict[fx.Node, int] = {}  # ops of its recomputation
        self.stages_of: dict[fx.Node, set[int]] = {}  # stages of these ops
        sizes = (bytes_of(node) for node in self.joint.forward if self.joint.storages[node] is node)
        large = _SMALL * max(sizes, default=0)
        for node in self.joint.forward:
            if self._is_cheap(node) and self._can_be_recomputed(node):
                late = self.first.get(node)
                if late is not None and bytes_of(node) > large and self.until[node] >= late:
                    self.dropped.add(node)

    def _can_be_recomputed(self, node: fx.Node) -> bool:
        sources = sources_of(self.joint, node)
        until = min((self._available(value) for value in sources), default=float("inf"))
        again = [v for v in sources if v in self.cost and (v in self.dropped or self.last.get(v, -1) < until)]
        cost = sum(self.cost[value] for value in again)
        cost += not is_item(node) and self.joint.storages[node] is node
        if until < 0 or cost > _LONGEST:
            return False
        self.until[node], self.cost[node] = until, cost
        self.stages_of[node] = {self.stages.of[node]}.union(*(self.stages_of[value] for value in again))
        return True

    def _available(self, node: fx.Node) -> float:
        """Last backward position at which the value is available."""
        if node in self.stages.always_kept:
            return float("inf")
        again, last_read = self.until.get(node, -1), self.last.get(node, -1)
        return again if node in self.dropped else max(again, last_read)

    def _is_cheap(self, node: fx.Node) -> bool:
        """Whether a result is cheap, or shows a cheap result's storage: a view, or one of several outputs."""
        if is_random(node) or node in self.stages.always_kept:
            return False
        if is_item(node) or self.joint.storages[node] is not node:
            return all(value in self.until for value in node.all_input_nodes)
        return bool(node.all_input_nodes) and (is_elementwise(node) or name_of(node.target) in _CHEAP)


def sources_of(joint: Joint, node: fx.Node) -> list[fx.Node]:
    """Results of forward ops that an op reads when it is recomputed."""
    return [value for value in inputs_of(node, again=True) if joint.is_forward(value)]


class LightStages:
    """Follow a schedule, and track which cheap results of lightly kept stages are freed."""

    def __init__(self, stages: Stages) -> None:
        self.stages = stages
        self.stale: set[fx.Node] = set()  # dropped; results computed from it are no longer read
        self._whole: set[int] = set()  # stages that are kept now
        self._fresh: set[fx.Node] = set()  # recomputed on the way to a dropped one

    def note(self, step: Operation) -> None:
        """Advance to the next operation."""
        if step.kind is Step.BACKWARD:
            return
        nodes = self.stages.forward[step.stage]
        self.stale.difference_update(nodes)
        self._fresh.difference_update(nodes)
        if step.kind in (Step.EVERYTHING, Step.LIGHT):
            self._whole.add(step.stage)
        else:
            self._whole.discard(step.stage)
        if step.kind in (Step.EVERYTHING, Step.LIGHT):
            cheap = self.stages.cheap
            dropped = cheap.dropped if step.kind is Step.LIGHT else self.stages.free
            self.stale |= {node for node in dropped.intersection(nodes) if cheap.stages_of[node] <= self._whole}
        if step.kind is Step.CHECKPOINT:
            self.stale -= self.stages.inputs[step.stage]  # the stage will run again from it

    def is_available(self, node: fx.Node) -> bool:
        is_saved = node in self.stages.cheap.last or node in self.stages.always_kept
        return node in self._fresh or (is_saved and node not in self.stale)

    def recomputed(self, node: fx.Node) -> None:
        """Mark a result as available again."""
        self.stale.discard(node)
        self._fresh.add(node)
