"""Keep activations in few bits: what ops save for backward is stored in 2, 4 or 8 bits, rounded at random.

Inside ``compressed`` saved-tensor hooks replace every saved activation by a buffer of codes. The activation itself dies
as soon as the forward pass no longer needs it; each op that saved it has it decompressed when its backward runs.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lowtide.kernels.compress import DTYPES, GROUP, Draws, buffer_bytes, check, compress, decompress
from lowtide.nn.rebuild import Chained, Kept, may_open
from lowtide.tracing.internals import autograd

LEAST_BYTES = 1024  # smaller tensors are kept as they are: there is nothing to gain, and they are often statistics

# Their backward takes the exponential of their output, or sums it over a row: a step of rounding is not small there.
SENSITIVE = frozenset({"SoftmaxBackward0", "LogSoftmaxBackward0", "SafeSoftmaxBackward0"})

_seeds = itertools.count()


def sensitive(tensor: Tensor) -> bool:
    """What ``compressed`` keeps by itself, of what it could compress: the results of softmax and log-softmax."""
    return _origin(tensor.grad_fn).name() in SENSITIVE


@contextmanager
def compressed(
    bits: int = 4, *, group: int = GROUP, keep: Callable[[Tensor], bool] = sensitive, seed: int | None = None
) -> Generator[None]:
    """Store what ops inside save for backward in ``bits`` bits (2, 4 or 8), each ``group`` values with two float32.

    The forward pass is as without. A value comes back within (max - min) / (2^bits - 2) of what it was, of its group,
    and right on average; gradients are therefore approximate. No global random numbers are drawn; with ``seed`` the
    same ones are drawn in every use.

    Kept as they are: parameters, their views and casts; inputs and all else that has no gradient (statistics, masks,
    integers); tensors below 1 KiB; the inputs of ``torch.utils.checkpoint``, and what is saved inside one; and what
    ``keep`` says. The first op that saves a tensor decides its bits. Other hooks get the codes to keep in its place.

    >>> layers = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    >>> with compressed(bits=4):
    ...     loss = layers(torch.randn(32, 64)).square().mean()
    >>> loss.backward()
    """
    check(bits, group)
    if not may_open():
        yield
        return
    drawn = torch.initial_seed() + 0x9E3779B97F4A7C15 * next(_seeds) if seed is None else seed
    hooks = _Hooks(bits, group, keep, Draws(drawn))
    with torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack):
        yield


def compressible(tensor: Tensor) -> bool:
    """Whether a tensor that an op saves is an activation, large enough, and of a kind that can be stored."""
    return (
        type(tensor) in (Tensor, FakeTensor)
        and tensor.grad_fn is not None
        and tensor.dtype in DTYPES
        and tensor.layout is torch.strided
        and tensor.device.type in ("cpu", "cuda")
        and tensor.numel() * tensor.itemsize >= LEAST_BYTES
        and not tensor.is_neg()
        and _origin(tensor.grad_fn).name() != "torch::autograd::AccumulateGrad"
    )


class _Hooks:
    """The hooks of one ``compressed``."""

    def __init__(self, bits: int, group: int, keep: Callable[[Tensor], bool], draws: Draws) -> None:
        self.bits, self.group, self.keep, self.draws = bits, group, keep, draws
        outer = autograd._top_saved_tensors_default_hooks(True)
        owner = getattr(outer[0], "__self__", None) if outer is not None else None
        self.outer = owner.outer if isinstance(owner, _Hooks) else outer  # of two of ours, the inner one decides

    def pack(self, tensor: Tensor) -> Any:
        if compressible(tensor) and not _is_checkpoint(sys._getframe(1)) and not self.keep(tensor):
            place = _Place.of(tensor)
            if place is not None:
                record = _records.get(place.key)
                if record is None or not record.is_of(tensor):
                    record = self._record(tensor, place)
                if record is not None:
                    return _Stored(record, place)
        # An op's own output, packed as it is, would keep its node alive, and the node it.
        if self.outer is None:
            return Kept(tensor.detach(), tensor._version)
        return Chained(self.outer[1], self.outer[0](tensor))

    @staticmethod
    def unpack(packed: Any) -> Any:
        return packed.unpack()

    def _record(self, tensor: Tensor, place: _Place) -> _Record | None:
        if buffer_bytes(place.numel, self.bits, self.group, tensor.dtype) >= tensor.untyped_storage().nbytes():
            return None
        flat = place.flat(tensor.detach())
        buffer = compress(flat, self.draws, bits=self.bits, group=self.group)
        kept = Kept(buffer, buffer._version) if self.outer is None else Chained(self.outer[1], self.outer[0](buffer))
        record = _records[place.key] = _Record(tensor, kept, place.numel, self.bits, self.group)
        return record


class _Place:
    """Which values of a storage a tensor shows: a stretch without gaps, or else values that have to be copied."""

    __slots__ = ("dense", "key", "numel", "offset", "shape", "stride")

    def __init__(self, tensor: Tensor, numel: int, *, dense: bool) -> None:
        self.dense, self.numel = dense, numel
        self.shape, self.stride, self.offset = tensor.shape, tensor.stride(), tensor.storage_offset()
        geometry = (self.offset, numel) if dense else (self.offset, self.shape, self.stride)
        self.key = (tensor.untyped_storage()._cdata, tensor._version, tensor.dtype, geometry)

    @classmethod
    def of(cls, tensor: Tensor) -> _Place | None:
        """None where the values would take more than their storage, as those of an expanded view."""
        numel = _stretch(tensor)
        if numel is not None:
            return cls(tensor, numel, dense=True)
        large = tensor.numel() * tensor.itemsize > tensor.untyped_storage().nbytes()
        return None if large else cls(tensor, tensor.numel(), dense=False)

    def flat(self, tensor: Tensor) -> Tensor:
        return tensor.as_strided((self.numel,), (1,)) if self.dense else tensor.contiguous().view(-1)

    def view(self, flat: Tensor) -> Tensor:
        return flat.as_strided(self.shape, self.stride, 0) if self.dense else flat.view(self.shape)


class _Record:
    """A compressed tensor, for all who saved it. It holds no memory of the tensor's."""

    __slots__ = ("__weakref__", "_bits", "_dtype", "_group", "_kept", "_numel", "_storage")

    def __init__(self, tensor: Tensor, kept: Kept | Chained, numel: int, bits: int, group: int) -> None:
        self._storage = weakref.ref(tensor.untyped_storage())
        self._kept, self._numel, self._bits, self._group, self._dtype = kept, numel, bits, group, tensor.dtype

    def is_of(self, tensor: Tensor) -> bool:
        """Whether the storage still is the one that was compressed, and not another at its address."""
        return self._storage() is not None

    def give(self) -> Tensor:
        return decompress(self._kept.unpack(), self._numel, self._dtype, bits=self._bits, group=self._group)


class _Stored:
    """What is saved in place of a tensor."""

    __slots__ = ("place", "record")

    def __init__(self, record: _Record, place: _Place) -> None:
        self.record, self.place = record, place

    def unpack(self) -> Tensor:
        return self.place.view(self.record.give())


_records: weakref.WeakValueDictionary[Any, _Record] = weakref.WeakValueDictionary()  # as long as a graph has them

_VIEWS = frozenset((
    "AliasBackward0", "AsStridedBackward0", "CloneBackward0", "ExpandBackward0", "PermuteBackward0",
    "ReshapeAliasBackward0", "SelectBackward0", "SliceBackward0", "SplitBackward0", "SplitWithSizesBackward0",
    "SqueezeBackward0", "SqueezeBackward1", "SqueezeBackward2", "TBackward0", "ToCopyBackward0", "TransposeBackward0",
    "UnbindBackward0", "UnsafeSplitBackward0", "UnsafeViewBackward0", "UnsqueezeBackward0", "ViewBackward0",
))  # fmt: skip


def _origin(node: Any) -> Any:
    """The node that made the values: that before all views, copies and casts."""
    while node.name() in _VIEWS and node.next_functions[0][0] is not None:
        node = node.next_functions[0][0]
    return node


def _stretch(tensor: Tensor) -> int | None:
    """How many neighbours in memory a tensor shows, in any order or repeated; None if there are gaps."""
    if tensor.is_contiguous():
        return tensor.numel()
    numel = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride > 0:
            if stride != numel:
                return None
            numel *= size
    return numel


def _is_checkpoint(frame: FrameType | None) -> bool:
    """Whether a checkpoint saves its inputs. What is made again from rounded ones would be another function's."""
    for _ in range(4):
        if frame is None:
            return False
        if frame.f_globals.get("__name__") == "torch.utils.checkpoint":
            return True
        frame = frame.f_back
    return False
