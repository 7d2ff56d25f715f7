"""Other tensors of the process, which the allocator counts together with the step's."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.compat.tensors import storage_id
from lowtide.tracing.dense_parts import address, parts
from lowtide.tracing.snapshot.held_tensors import tensors_of
from lowtide.workload import Workload

_PLAIN = (Tensor, nn.Parameter)


class OtherTensors:
    """The storages on a device that Python's tensors show, but for those of some tensors.

    It keeps nothing alive. Tensors that C++ alone holds, such as those saved by another graph, are not found: they
    count as the step's.
    """

    def __init__(self, device: torch.device, known: Iterable[Tensor], *, granularity: int = 1) -> None:
        gc.collect()  # tensors in dead cycles could be freed during the step
        self._granularity = granularity
        mine = {address(part) for tensor in known for part in parts(tensor)}
        self._found: dict[int, tuple[weakref.ref[Any], int]] = {}
        for tensor in gc.get_objects():
            storage = _storage_on(tensor, device) if type(tensor) in _PLAIN else None
            if storage is not None and storage_id(storage) not in mine:
                self._found[storage_id(storage)] = weakref.ref(storage), storage.nbytes()

    def exclude(self, storage: int) -> None:
        """Count the storage at an address as the step's, which has come to use it."""
        self._found.pop(storage, None)

    @property
    def bytes(self) -> int:
        """Bytes of those that are still alive, as the allocator rounds them."""
        alive = (size for reference, size in self._found.values() if reference() is not None)
        return sum(-(-size // self._granularity) * self._granularity for size in alive)


def beside(work: Workload) -> OtherTensors | None:
    """Other tensors on the GPU of a step; None on a CPU, whose peaks are counted from the step's own events."""
    return OtherTensors(work.device, tensors_of(work), granularity=512) if work.device.type == "cuda" else None


def _storage_on(tensor: Tensor, device: torch.device) -> torch.UntypedStorage | None:
    try:
        is_there = tensor.device.type == device.type and device.index in (None, tensor.device.index)
        return tensor.untyped_storage() if is_there else None
    except Exception:  # none, as of a sparse tensor, or out of reach, as of one that torch.func wraps
        return None
