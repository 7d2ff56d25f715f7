"""Find writes that autograd does not count: those through ``.data``.

Such a write changes z and not its version, so a rebuilt z would differ. A model's code writes so at each call or at
none. So each layer compares values in its first calls, which waits for the device; later calls pay nothing.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from lowtide.compat.dispatch import active_modes
from lowtide.compat.fake import FakeTensor
from lowtide.compat.tensors import storage_id

CHECKED_CALLS = 2

Values = tuple[int, float]


class CheckedCalls:
    """The calls of one layer, which holds this: how many are still checked, and whether a write was seen."""

    def __init__(self, checks: int = CHECKED_CALLS) -> None:
        self.checks = checks
        self.is_written = False

    def read(self, tensor: Tensor) -> Values | None:
        """Read values to compare with later, in the first calls; None where they are not compared."""
        if not self.checks or not _can_read(tensor):
            return None
        self.checks -= 1
        return read(tensor)


class OwnedTensor:
    """A saved tensor, to compare with the one that backward gets: other hooks may return another."""

    def __init__(self, tensor: Tensor, calls: CheckedCalls) -> None:
        self._storage = weakref.ref(tensor.untyped_storage())
        self._values = calls.read(tensor)

    def is_written(self, tensor: Tensor) -> bool:
        """Tell whether values in the same storage differ."""
        storage = self._storage()
        if self._values is None or storage is None or storage_id(storage) != storage_id(tensor.untyped_storage()):
            return False
        return read(tensor) != self._values


def read(tensor: Tensor) -> Values:
    """Return all bits of a tensor, exclusive-ored, and its sum: an even number of changed signs keeps the first.

    The sum's dtype is given, since autocast on a GPU widens sums, but not in saved-tensor hooks.
    """
    wide = torch.promote_types(tensor.dtype, torch.float32)
    with torch.no_grad():
        return int(torch.hash_tensor(tensor).item()), float(tensor.sum(dtype=wide).nan_to_num())


def _can_read(tensor: Tensor) -> bool:
    """Tell whether reading is possible: not where a trace would record it, nor while a CUDA graph is captured."""
    if isinstance(tensor, FakeTensor) or active_modes() or not tensor.numel():
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())
