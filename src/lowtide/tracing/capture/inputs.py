"""The inputs of a captured graph, found again in the model and the batch of a later step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from lowtide.batches import flatten
from lowtide.compat.modules import own_buffers, own_parameters
from lowtide.errors import TraceError
from lowtide.tracing.step_state import modules_of
from lowtide.workload import Workload

_Finder = Callable[[list[Any]], Any]  # from the leaves of a batch to an input


class GraphInputs:
    """Finds a graph's inputs by their places: in a module, in the batch, or elsewhere. Holds no tensor alive."""

    def __init__(self, work: Workload, inputs: Sequence[Any]) -> None:
        places: dict[int, _Finder] = {}
        for index, leaf in enumerate(flatten(work.batch)[0]):
            places.setdefault(id(leaf), _in_batch(index))
        for module in modules_of(work):
            for own in (own_parameters, own_buffers):
                for name, tensor in own(module).items():
                    places.setdefault(id(tensor), _in_module(weakref.ref(module), own, name))
        self._places = [places.get(id(each)) or _elsewhere(each) for each in inputs]

    def __call__(self, batch: Any) -> list[Any]:
        """The inputs for a batch, as the modules hold them now."""
        leaves = flatten(batch)[0]
        return [place(leaves) for place in self._places]


def _in_batch(index: int) -> _Finder:
    return lambda leaves: leaves[index]


def _in_module(module: weakref.ref[Any], own: Callable[[Any], Any], name: str) -> _Finder:
    def place(_: list[Any]) -> Any:
        held = module()
        return _lost() if held is None else own(held)[name]

    return place


def _elsewhere(value: Any) -> _Finder:
    if not isinstance(value, Tensor):
        return lambda _: value
    tensor = weakref.ref(value)

    def place(_: list[Any]) -> Any:
        held = tensor()
        return _lost() if held is None else held

    return place


def _lost() -> Any:
    raise TraceError("An input of the captured graph is no longer held by the step", hint="Plan again.")
