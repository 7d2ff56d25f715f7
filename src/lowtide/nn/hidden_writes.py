"""Find writes that autograd does not count: those through ``.data``.

A write to ``z.data`` changes z and not its version, so that a rebuilt z would be another one. A model's code makes such
a write at each call or at none. So the values are compared in the first calls of a layer, which waits for the device;
later calls pay nothing.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from lowtide.compat.dispatch import count_modes
from lowtide.compat.fake import FakeTensor
from lowtide.compat.tensors import storage_id

CHECKED_CALLS = 2

Values = tuple[int, float]


class Calls:
    """The calls of one owner of values: how many were checked, and whether a write was found."""

    def __init__(self) -> None:
        self.checked = 0
        self.is_written = False

    def read(self, tensor: Tensor) -> Values | None:
        """Read values to compare with later, in the first calls. None where they are not to be compared."""
        if self.checked >= CHECKED_CALLS or not _can_read(tensor):
            return None
        self.checked += 1
        return read(tensor)


def calls_of(owner: object) -> Calls:
    """The calls of a layer or a parameter."""
    found = _calls.get(owner)
    if found is None:
        found = _calls[owner] = Calls()
    return found


def read(tensor: Tensor) -> Values:
    """All bits of a tensor, exclusive-ored, and its sum: an even number of changed signs leaves the first as it is.

    The sum's dtype is given, since autocast on a GPU widens sums, but not in saved-tensor hooks.
    """
    wide = torch.promote_types(tensor.dtype, torch.float32)
    with torch.no_grad():
        return int(torch.hash_tensor(tensor).item()), float(tensor.sum(dtype=wide).nan_to_num())


class OwnedTensor:
    """A tensor that is kept as it is, to be compared with what comes back. Hooks of others may keep something else."""

    def __init__(self, tensor: Tensor, calls: Calls) -> None:
        self._storage = weakref.ref(tensor.untyped_storage())
        self._values = calls.read(tensor)

    def is_written(self, tensor: Tensor) -> bool:
        """Whether values in the same storage differ."""
        storage = self._storage()
        if self._values is None or storage is None or storage_id(storage) != storage_id(tensor.untyped_storage()):
            return False
        return read(tensor) != self._values


NOBODY = Calls()  # stands for all that own no parameter
_calls: Any = WeakIdKeyDictionary()  # owner -> Calls


def _can_read(tensor: Tensor) -> bool:
    """Not where a trace would record it, nor where a CUDA graph is captured."""
    if isinstance(tensor, FakeTensor) or count_modes() or not tensor.numel():
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())
