"""Many shapes of the batch by one capture: sizes that differ are symbols, and each shape has a program of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, fx

from lowtide.batches import tensors
from lowtide.compat.symbols import varying
from lowtide.engines.autograd import Runner
from lowtide.engines.shapes import BatchDimension, differing, signature
from lowtide.errors import TraceError
from lowtide.tracing.capture.joint import Joint
from lowtide.tracing.capture.loss import CompiledLoss, differentiated, is_plain
from lowtide.tracing.capture.shapes import SymbolicJoint
from lowtide.workload import Workload

_MOST_CAPTURES = 2  # for many shapes: the second one where further dimensions differ
_MOST_FAILURES = 3  # shapes that the shared captures do not hold for, as where one takes another branch


class SharedCaptures:
    """Batches that differ from the planned one in sizes alone. From the second such shape on, they share a capture.

    ``is_planned`` compares such a capture, at the planned shape, with the planned graph: with symbols, Dynamo writes
    some arithmetic of sizes as other ops.
    """

    def __init__(self, work: Workload, is_planned: Callable[[Joint], bool]) -> None:
        self.work, self.is_planned = work, is_planned
        self._planned = signature(work.batch)
        self._met: set[Any] = set()
        self._shared: dict[Any, list[ManyShapes]] = {}
        self._failures = 0

    def find(self, key: Any, batch: Any) -> tuple[ManyShapes, UnplannedShape] | None:
        """The shared capture for a batch, which is captured if need be; None if its shape is to be captured alone."""
        shape = signature(batch)
        places = differing(shape, self._planned)
        if not places or self._failures == _MOST_FAILURES or any(shape[tensor][0][dim] < 2 for tensor, dim in places):
            return None
        structure, _, *setting = key
        alike = (structure, *setting)
        if alike not in self._met:
            self._met.add(alike)
            return None
        shared = self._shared.setdefault(alike, [])
        many = next((each for each in shared if places <= each.places), None)
        if many is None and len(shared) < _MOST_CAPTURES:
            many = ManyShapes(self.work, places.union(*(each.places for each in shared)))
            shared.append(many)
        unplanned = None if many is None else many.find(batch)
        if many is None or unplanned is None or not self._is_checked(many):
            self._failures += 1
            return None
        return many, unplanned

    def _is_checked(self, many: ManyShapes) -> bool:
        """Tell whether a capture gives the planned graph at the planned shape."""
        if many.is_planned is None:
            planned = many.find(self.work.batch)
            many.is_planned = planned is not None and self.is_planned(planned.joint())
        return many.is_planned

    def release(self) -> None:
        """Free all captures."""
        while self._shared:
            for each in self._shared.popitem()[1]:
                each.release()


class ManyShapes:
    """A loss captured for batches that differ in some dimensions.

    Dynamo's guards decide at every call whether a shape takes the captured way through the model's code.
    """

    def __init__(self, work: Workload, places: Iterable[BatchDimension]) -> None:
        self.places = frozenset(places)
        self.is_planned: bool | None = None  # whether the graph was compared with the planned one, and equals it
        self._backend = _SymbolicBackend()
        self._loss = CompiledLoss(work, self._backend)

    def find(self, batch: Any) -> UnplannedShape | None:
        """The shape of a batch, for which nothing runs yet; None where the captured graph does not hold for it."""
        self._backend.looks = True
        try:
            self(batch)
        except UnplannedShape as unplanned:
            return unplanned.with_traceback(None)
        except Exception:  # if it is the step's own, the capture of this shape alone raises it too
            return None
        finally:
            self._backend.looks = False
        return None

    def __call__(self, batch: Any) -> Tensor:
        """The loss of a batch whose shape has a program; ``UnplannedShape`` otherwise."""
        given = tensors(batch)
        with varying((given[tensor], dim) for tensor, dim in self.places):
            return self._loss(batch)

    def release(self) -> None:
        """Free the captured graphs and all programs."""
        self._loss.release()


class UnplannedShape(Exception):
    """Stop a step of a shape that has no program."""

    def __init__(self, graph: _SharedGraph, sizes: tuple[int, ...]) -> None:
        super().__init__(f"No program for sizes of {sizes}")
        self.graph, self.sizes = graph, sizes

    def joint(self) -> Joint:
        """The joint graph of this shape."""
        return self.graph.joint.at(self.sizes)

    def run_by(self, runner_of: Callable[[Sequence[int]], Runner]) -> None:
        """Have batches of this shape run by a program. ``runner_of`` takes the inputs that are written."""
        self.graph.runners[self.sizes] = runner_of(self.graph.moved)

    def forget(self) -> None:
        """Free the shape's program."""
        self.graph.runners.pop(self.sizes, None)


class _SharedGraph:
    """A captured graph, with a program for each shape that was planned."""

    def __init__(self, joint: SymbolicJoint, moved: Iterable[int], backend: _SymbolicBackend) -> None:
        self.joint, self.backend = joint, backend
        self.moved = [place - sum(size < place for size in joint.sizes) for place in moved]
        self.runners: dict[tuple[int, ...], Runner] = {}

    def __call__(self, *inputs: Any) -> Any:
        sizes = tuple(inputs[place] for place in self.joint.sizes)
        runner = None if self.backend.looks else self.runners.get(sizes)
        if runner is None:
            raise UnplannedShape(self, sizes)
        return runner(*(value for place, value in enumerate(inputs) if place not in self.joint.sizes))


class _SymbolicBackend:
    """For Dynamo, which holds it: the first graph of the forward pass in, what runs the program of a shape out."""

    def __init__(self) -> None:
        self.looks = False  # for a shape, so that nothing runs
        self._is_captured = False

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        if self._is_captured:
            raise TraceError("The shape takes another way through the model's code than the captured one")
        _, joints = differentiated(module, inputs, SymbolicJoint)
        self._is_captured = True
        for joint, about in joints:
            if joint.sizes and is_plain(joint.inputs, joint.forward_outputs, len(inputs), about):
                return _SharedGraph(joint, about.mutated_inp_runtime_indices, self)
        raise TraceError("The loss is not captured with symbols for sizes")
