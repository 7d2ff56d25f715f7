"""Store the activations that ops save for backward in 2, 4 or 8 bits, rounded at random.

Inside ``compressed``, saved-tensor hooks replace every saved activation by a buffer of codes. The activation is freed
once the forward pass no longer needs it. Each op that saved it decompresses it when its backward runs.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from lowtide.compat.autograd import CHECKPOINT, packed_tensors, top_saved_hooks
from lowtide.compat.dynamo import AOT_AUTOGRAD
from lowtide.compat.fake import FakeTensor
from lowtide.compat.frames import frame_at
from lowtide.compat.tensors import base_of, storage_id, version_of
from lowtide.kernels.compress import DTYPES, GROUP, Draws, buffer_bytes, check, compress, decompress
from lowtide.kernels.reference.compress import Noise
from lowtide.nn.rebuild import Chained, SavedTensor, save_as_is, unpack
from lowtide.nn.scopes import may_open

LEAST_BYTES = 1024  # smaller tensors, often statistics, are saved as they are

# Ops by parts of their names, in lower case and without "_": ATen's and torch's nodes, and other libraries' functions.
# Their backward takes the exponential of an input, less an exact log-sum: rounding would grow without bound. That of a
# fused attention then subtracts the row sums of dO * O from dO @ V.T. Where a row attends to one place, little is left:
# the value and the result cannot be rounded either.
_EXPONENTIATING = re.compile("attention|attn|fmha|logsumexp|logcumsumexp|logndtr|ctcloss")
# The backward of these takes the exponential of their result, sums it over a row, or divides by it.
_SENSITIVE = re.compile(f"softmax|ndtri|(?<!r)sqrt|{_EXPONENTIATING.pattern}")


def sensitive(tensor: Tensor) -> bool:
    """Tell whether ``compressed`` saves an activation as it is by default: a result of softmax, attention or sqrt."""
    node = base_of(tensor).grad_fn
    return node is not None and is_sensitive(node.name())


def is_sensitive(op: str) -> bool:
    """Tell whether the result of an op, or node, is saved as it is."""
    return _SENSITIVE.search(op.lower().replace("_", "")) is not None


def exponentiates(op: str) -> bool:
    """Tell whether all inputs of an op, or node, are saved as they are."""
    return _EXPONENTIATING.search(op.lower().replace("_", "")) is not None


@contextmanager
def compressed(
    bits: int = 4, *, group: int = GROUP, keep: Callable[[Tensor], bool] = sensitive, seed: int | None = None
) -> Generator[None]:
    """Store what ops inside save for backward in ``bits`` bits (2, 4 or 8), each ``group`` values with two float32.

    The forward pass does not change. A restored value is unbiased, and off by at most (max - min) / (2^bits - 2) of its
    group. Gradients are therefore approximate. No global random numbers are drawn: rounding follows from the seed of
    torch's generator, or ``seed``, and from the values. A repeated step rounds as before.

    Saved as they are:

    - parameters, their views and casts; tensors without a gradient (inputs, statistics, masks, integers)
    - tensors below 1 KiB; tensors for which ``keep`` is true
    - inputs that a backward exponentiates, such as the query and key of a fused attention
    - tensors that ``torch.utils.checkpoint`` and compiled regions save

    The first op that saves a tensor decides its bits. Outer hooks get the codes.

    >>> layers = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    >>> with compressed(bits=4):
    ...     loss = layers(torch.randn(32, 64)).square().mean()
    >>> loss.backward()
    """
    check(bits, group)
    if not may_open():
        yield
        return
    with Hooks(bits, group, keep, seed).open():
        yield


def compressible(tensor: Tensor) -> bool:
    """Tell whether a saved tensor is an activation, large enough, and of a kind that can be stored."""
    if (
        type(tensor) not in (Tensor, FakeTensor)
        or tensor.grad_fn is None
        or tensor.dtype not in DTYPES
        or tensor.layout is not torch.strided
        or tensor.device.type not in ("cpu", "cuda")
        or tensor.numel() * tensor.itemsize < LEAST_BYTES
        or tensor.is_neg()
    ):
        return False
    origin = _origin(tensor)
    return origin is not None and origin.name() != "torch::autograd::AccumulateGrad"


class Hooks:
    """The hooks of one ``compressed``."""

    def __init__(self, bits: int, group: int, keep: Callable[[Tensor], bool], seed: int | None = None) -> None:
        self.bits, self.group, self.keep = bits, group, keep
        self.draws = _DrawsByValue() if seed is None else Draws(seed)
        outer = top_saved_hooks(True)
        owner = getattr(outer[0], "__self__", None) if outer is not None else None
        self.outer = owner.outer if isinstance(owner, Hooks) else outer  # of two of ours, the inner one decides

    def open(self) -> AbstractContextManager[None]:
        return torch.autograd.graph.saved_tensors_hooks(self.pack, unpack)

    def pack(self, tensor: Tensor) -> Any:
        # Autograd does not say which op saves a tensor. The op's result, which it saves last, knows its node.
        if tensor.grad_fn is not None and exponentiates(tensor.grad_fn.name()):
            for packed in list(packed_tensors(tensor.grad_fn)):
                self.save_exactly(packed)
        if compressible(tensor) and not _is_opaque(frame_at(1)) and not self.keep(tensor):
            place = _ShownValues.of(tensor)
            if place is not None:
                record = _records.get(place.key)
                if record is None or not record.is_valid:
                    record = self._record(tensor, place)
                if record is not None:
                    return _Stored(record, place, tensor)
        return self._exact(tensor)

    def save_exactly(self, packed: Any) -> None:
        """Keep an input of the running op uncompressed."""
        if isinstance(packed, _Stored):
            packed.save_exactly(self._exact)

    def _exact(self, tensor: Tensor) -> SavedTensor | Chained:
        return save_as_is(tensor, self.outer)

    def _record(self, tensor: Tensor, place: _ShownValues) -> _SharedCodes | None:
        if buffer_bytes(place.numel, self.bits, self.group, tensor.dtype) >= tensor.untyped_storage().nbytes():
            return None
        flat = place.flat(tensor.detach())
        if isinstance(self.draws, _DrawsByValue):
            self.draws.see(flat)
        buffer = compress(flat, self.draws, bits=self.bits, group=self.group)
        record = _records[place.key] = _SharedCodes(tensor, self._exact(buffer), place.numel, self.bits, self.group)
        return record


class _ShownValues:
    """The values of a storage that a tensor shows: a stretch without gaps, or values to copy."""

    __slots__ = ("dense", "key", "numel", "offset", "shape", "stride")

    def __init__(self, tensor: Tensor, numel: int, *, dense: bool) -> None:
        self.dense, self.numel = dense, numel
        self.shape, self.stride, self.offset = tensor.shape, tensor.stride(), tensor.storage_offset()
        geometry = (self.offset, numel) if dense else (self.offset, self.shape, self.stride)
        self.key = (storage_id(tensor.untyped_storage()), version_of(tensor), tensor.dtype, geometry)

    @classmethod
    def of(cls, tensor: Tensor) -> _ShownValues | None:
        """Read a tensor; None if its values take more than their storage, as in an expanded view."""
        numel = _stretch(tensor)
        if numel is not None:
            return cls(tensor, numel, dense=True)
        large = tensor.numel() * tensor.itemsize > tensor.untyped_storage().nbytes()
        return None if large else cls(tensor, tensor.numel(), dense=False)

    def flat(self, tensor: Tensor) -> Tensor:
        return tensor.as_strided((self.numel,), (1,)) if self.dense else tensor.contiguous().view(-1)

    def view(self, flat: Tensor) -> Tensor:
        return flat.as_strided(self.shape, self.stride, 0) if self.dense else flat.view(self.shape)


class _SharedCodes:
    """A compressed tensor, shared by all ops that saved it. It holds none of the tensor's memory."""

    __slots__ = ("__weakref__", "_bits", "_codes", "_dtype", "_group", "_numel", "_storage")

    def __init__(self, tensor: Tensor, codes: SavedTensor | Chained, numel: int, bits: int, group: int) -> None:
        self._storage = weakref.ref(tensor.untyped_storage())
        self._codes, self._numel, self._bits, self._group, self._dtype = codes, numel, bits, group, tensor.dtype

    @property
    def is_valid(self) -> bool:
        """Tell whether the compressed storage lives: another one may have its address by now."""
        return self._storage() is not None

    def give(self) -> Tensor:
        return decompress(self._codes.unpack(), self._numel, self._dtype, bits=self._bits, group=self._group)


class _Stored:
    """Saved in place of a tensor."""

    __slots__ = ("_exact", "_place", "_record", "_tensor")

    def __init__(self, record: _SharedCodes, place: _ShownValues, tensor: Tensor) -> None:
        self._record: _SharedCodes | None = record
        self._exact: SavedTensor | Chained | None = None
        self._tensor = weakref.ref(tensor)
        self._place = place

    def save_exactly(self, keep: Callable[[Tensor], SavedTensor | Chained]) -> None:
        tensor = self._tensor()
        if tensor is not None and self._exact is None:
            self._exact, self._record = keep(tensor), None

    def unpack(self) -> Tensor:
        if self._record is None:
            assert self._exact is not None
            return self._exact.unpack()
        return self._place.view(self._record.give())


class _DrawsByValue(Draws):
    """Draws that follow from torch's seed and the values of the first tensor, which change from step to step.

    A counter would differ in a resumed run, and a draw from torch's generator would change the user's own draws.
    """

    def __init__(self) -> None:
        super().__init__(torch.initial_seed())
        self._drawn: Tensor | None = None
        self._is_read = False  # which waits for the device

    def see(self, flat: Tensor) -> None:
        if self._drawn is None:
            sample = flat[:: max(1, flat.numel() // _SAMPLE)].view(_INTEGERS[flat.itemsize])
            self._drawn = (sample.long().sum() * _ODD + self.seed) & (2**62 - 1)  # a sum that casts hides a copy

    def on(self, device: torch.device) -> Tensor:
        assert self._drawn is not None
        return self._drawn.to(device)

    def noise(self, x: Tensor, group: int) -> Noise:
        assert self._drawn is not None
        if not self._is_read and not isinstance(x, FakeTensor):
            self.seed, self._is_read = int(self._drawn), True
        return super().noise(x, group)


_records: weakref.WeakValueDictionary[Any, _SharedCodes] = weakref.WeakValueDictionary()  # as long as a graph has them

_SAMPLE = 4096  # of a tensor's values, at least, or all
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_ODD = 0x1E3779B97F4A7C15

_VIEWS = frozenset((
    "AliasBackward", "AsStridedBackward", "CloneBackward", "ConjBackward", "DiagonalBackward", "ExpandBackward",
    "PermuteBackward", "ReshapeAliasBackward", "SelectBackward", "SliceBackward", "SplitBackward",
    "SplitWithSizesBackward", "SqueezeBackward", "TBackward", "ToCopyBackward", "TransposeBackward", "UnbindBackward",
    "UnfoldBackward", "UnsafeSplitBackward", "UnsafeViewBackward", "UnsqueezeBackward", "ViewAsComplexBackward",
    "ViewAsRealBackward", "ViewBackward",
))  # fmt: skip


def _origin(tensor: Tensor) -> Any:
    """The node that made the values: that before all views, copies and casts. None for a view of a leaf."""
    node = base_of(tensor).grad_fn  # before any view; the nodes lead through copies
    while node is not None and node.name().rstrip("0123456789") in _VIEWS:
        node = node.next_functions[0][0]
    return node


def _stretch(tensor: Tensor) -> int | None:
    """Number of neighbours in memory that a tensor shows, in any order or repeated; None if there are gaps."""
    if tensor.is_contiguous():
        return tensor.numel()
    numel = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride > 0:
            if stride != numel:
                return None
            numel *= size
    return numel


_OPAQUE = (CHECKPOINT, AOT_AUTOGRAD)


def _is_opaque(frame: FrameType | None) -> bool:
    """Tell whether a checkpoint, which would recompute from rounded inputs, or a compiled region saves."""
    for _ in range(4):
        if frame is None:
            return False
        if str(frame.f_globals.get("__name__")).startswith(_OPAQUE):
            return True
        frame = frame.f_back
    return False
