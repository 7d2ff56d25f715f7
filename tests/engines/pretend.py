"""A recorder for machines without a GPU: a call that was recorded runs again, and fills the results that it had."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from lowtide.engines.cuda_graphs import GraphRecorder
from lowtide.engines.recorded import _span


class PretendRecorder(GraphRecorder):
    """Counts launches. As with CUDA graphs, recording changes nothing, and all tensors stay where they are."""

    device_type = "cpu"
    launches = 0

    def __init__(self, device: torch.device, block_bytes: int = 0) -> None:
        self._block_bytes = block_bytes

    def record(self, code: Callable[[list[Any]], Any], arguments: list[Any]) -> tuple[Callable[[], None], Any]:
        held = [_at(each) for each in arguments]  # other tensors, of the same memory: a parameter's may change
        spans = [_span(each) for each in held]
        before = [each.clone() for each in spans]
        state = torch.get_rng_state()
        results = code(arguments)
        torch.set_rng_state(state)
        for span, value in zip(spans, before, strict=True):
            span.copy_(value)

        def launch() -> None:
            with torch.no_grad():
                for old, new in zip(tensors_in(results), tensors_in(code(list(held))), strict=True):
                    _span(old.data).copy_(_span(new))
            PretendRecorder.launches += 1

        return launch, results

    def finish(self) -> tuple[int, int]:
        return 0, 0

    @staticmethod
    def free() -> None:
        pass

    @staticmethod
    def is_recording() -> bool:
        return False


def _at(tensor: Tensor) -> Tensor:
    own = torch.empty(0, dtype=tensor.dtype)
    return own.set_(tensor.detach().untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def tensors_in(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, Mapping):
        yield from tensors_in(list(values.values()))
    elif isinstance(values, list | tuple):
        for each in values:
            yield from tensors_in(each)
