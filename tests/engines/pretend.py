"""A recorder for machines without a GPU: a call that was recorded runs again, and fills the results that it had."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lowtide.engines.recorded import GraphRecorder


class PretendRecorder(GraphRecorder):
    """Counts launches. As with CUDA graphs, recording changes nothing, and results stay where they are."""

    launches = 0

    def __init__(self, block_bytes: int = 0) -> None:
        pass

    @staticmethod
    def takes(tensors: Sequence[Any]) -> bool:
        return all(isinstance(each, Tensor) for each in tensors)

    def record(self, code: Callable[[list[Any]], Any], arguments: list[Any]) -> tuple[Callable[[], None], Any]:
        held = list(arguments)
        before = [each.clone() for each in held]
        state = torch.get_rng_state()
        results = code(arguments)
        torch.set_rng_state(state)
        for tensor, value in zip(held, before, strict=True):
            tensor.data.copy_(value)

        def launch() -> None:
            with torch.no_grad():
                for old, new in zip(tensors_in(results), tensors_in(code(list(held))), strict=True):
                    old.data.copy_(new)
            PretendRecorder.launches += 1

        return launch, results

    def sizes(self) -> tuple[int, int]:
        return 0, 0

    @staticmethod
    def free() -> None:
        pass


def tensors_in(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, Mapping):
        yield from tensors_in(list(values.values()))
    elif isinstance(values, list | tuple):
        for each in values:
            yield from tensors_in(each)
