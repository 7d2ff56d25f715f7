"""Keep one buffer: ops save a recipe in place of an output that its layer can recompute.

A convolution saves the output z of the activation before it. A layer that keeps its own input can recompute z. Inside a
*scope*, saved-tensor hooks replace every saved z by a recipe: the layer's node, and how to view its result. The first
reader that needs z in backward recomputes it; after the last reader z is freed.

A scope is open during the outermost forward of a model that holds such a layer, or under ``keep_one_buffer``.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowtide.compat.autograd import pop_saved_hooks, push_saved_hooks, top_saved_hooks
from lowtide.compat.tensors import storage_id, version_of
from lowtide.nn.hidden_writes import CheckedCalls, read


class Rebuildable:
    """A tensor that ``rebuild()`` recomputes, and its recipes.

    ``_alive`` recipes exist, and ``_served`` of them read the tensor since it was recomputed. It is freed when all did.
    """

    __slots__ = (
        "__weakref__", "_alive", "_calls", "_compute", "_dtype", "_is_written", "_offset", "_rebuilt", "_round",
        "_served", "_shape", "_storage", "_stride", "_values", "_version",
    )  # fmt: skip

    def __init__(
        self, tensor: Tensor, rebuild: Callable[[], Tensor], forget: Callable[[Any], object], calls: CheckedCalls
    ) -> None:
        self._storage = weakref.ref(tensor.untyped_storage(), forget)
        self._version = version_of(tensor)
        self._dtype = tensor.dtype
        self._offset = tensor.storage_offset()
        self._shape, self._stride = tensor.shape, tensor.stride()
        self._calls, self._values, self._is_written = calls, calls.read(tensor), False
        self._compute = rebuild
        self._rebuilt: Tensor | None = None
        self._alive = self._served = self._round = 0

    def covers(self, tensor: Tensor) -> bool:
        """Tell whether a tensor shows this one's values: the same storage, not written since."""
        is_same = version_of(tensor) == self._version and tensor.dtype == self._dtype
        if self._storage() is None or not is_same or tensor.is_neg() or tensor.is_conj():
            return False
        return not self._has_hidden_write(tensor)

    def _has_hidden_write(self, tensor: Tensor) -> bool:
        """Tell whether values differ from the layer's. If so, waiting readers get current ones, as in a plain step."""
        if self._values is not None and not self._is_written:
            whole = tensor.detach().as_strided(self._shape, self._stride, self._offset)
            if read(whole) != self._values:
                self._is_written = self._calls.is_written = True
                self._rebuilt = whole if self._alive else None
        return self._is_written

    def recipe(self, tensor: Tensor) -> Recipe:
        """Return the recipe to save in place of this tensor, or of a view of it."""
        self._alive += 1
        return Recipe(self, tensor)

    def tensor_for(self, recipe: Recipe) -> Tensor:
        if scope.rebuilding:  # for another join: if held, a chain of joins would be alive at once
            return self._rebuild() if self._rebuilt is None else self._rebuilt
        if self._rebuilt is None:  # in a second backward pass, all may come again
            self._hold()
        tensor = self._rebuilt
        assert tensor is not None
        if recipe.round != self._round:
            recipe.round = self._round
            self._served += 1
            self._free()
        return tensor

    def hold_for_late_readers(self) -> None:
        """Recompute now if a reader still waits: the layer's own backward is about to free its inputs."""
        if self._served < self._alive and self._rebuilt is None:
            self._hold()

    def forget(self, recipe: Recipe) -> None:
        """Note that a recipe's graph was dropped."""
        self._served -= recipe.round == self._round
        self._free()

    def _hold(self) -> None:
        rebuilt = self._rebuild()
        self._round += 1
        self._served = 0
        self._rebuilt = rebuilt

    def _free(self) -> None:
        if self._served >= self._alive and not (self._is_written and self._alive):
            self._rebuilt = None

    def _rebuild(self) -> Tensor:
        scope.rebuilding += 1
        try:
            tensor = self._compute()
        finally:
            scope.rebuilding -= 1
        if tensor.stride() == self._stride:
            return tensor
        # Hooks of others saved the layer's input in another layout, and recipes know the original strides.
        laid_out = torch.empty_strided(tensor.shape, self._stride, dtype=tensor.dtype, device=tensor.device)
        return laid_out.copy_(tensor)


class Recipe:
    """A saved view of a rebuildable tensor: its shape, strides and offset there."""

    __slots__ = ("_offset", "_rebuildable", "_shape", "_stride", "round")

    def __init__(self, rebuildable: Rebuildable, tensor: Tensor) -> None:
        self._rebuildable = rebuildable
        self._shape = tensor.shape
        self._stride = tensor.stride()
        self._offset = tensor.storage_offset() - rebuildable._offset
        self.round = -1  # of rebuilding in which this recipe read the tensor

    def unpack(self) -> Tensor:
        tensor = self._rebuildable.tensor_for(self)
        if tensor.shape == self._shape and tensor.stride() == self._stride and not self._offset:
            return tensor
        return tensor.as_strided(self._shape, self._stride, tensor.storage_offset() + self._offset)

    def __del__(self) -> None:
        rebuildable = self._rebuildable
        rebuildable._alive -= 1
        if rebuildable._rebuilt is not None or self.round >= 0:
            rebuildable.forget(self)


class SavedTensor(NamedTuple):
    """A tensor that is saved as it is. It checks for in-place changes, which torch does not where hooks run."""

    tensor: Tensor
    version: int

    def unpack(self) -> Tensor:
        if version_of(self.tensor) != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation. "
                f"A {self.tensor.dtype} tensor of shape {list(self.tensor.shape)} is at version "
                f"{version_of(self.tensor)}; expected version {self.version} instead"
            )
        return self.tensor


class Chained(NamedTuple):
    """A tensor as the hooks around packed it."""

    unpack_hook: Callable[[Any], Any]
    packed: Any

    def unpack(self) -> Any:
        return self.unpack_hook(self.packed)


def save_as_is(tensor: Tensor, outer: tuple[Any, Any] | None) -> SavedTensor | Chained:
    """Save a tensor as it is, or as the hooks around save it."""
    if outer is not None:
        return Chained(outer[1], outer[0](tensor))
    # An op's own output would keep its node alive, and the node it.
    return SavedTensor(tensor.detach(), version_of(tensor))


def unpack(packed: Any) -> Any:
    """The hook that returns a saved tensor, or rebuilds it."""
    return packed.unpack()


class Scope(threading.local):
    """The hooks of this thread, and the records of tensors that live."""

    def __init__(self) -> None:
        self.owner: Any = None  # the frame that opened it, or "by hand"
        self.replaces = False  # not in a model without such layers, whose modules need not be searched again
        self.outer: Any = None  # the hooks that were there
        self.records: dict[int, Rebuildable] = {}
        self.rebuilding = 0  # how deep: a join is rebuilt from the join before it

    @property
    def is_open(self) -> bool:
        """Tell whether a scope is open. If its forward was interrupted without a hook, it is closed now."""
        if self.owner is None or self.owner == "by hand":
            return self.owner is not None
        try:
            self.owner.clear()  # no running frame can be
        except RuntimeError:
            return True
        self.close()
        return False

    def open(self, owner: Any, *, replaces: bool = True) -> None:
        while self._is_on_top:  # left by a scope that ended below other hooks
            pop_saved_hooks()
        self.owner, self.replaces = owner, replaces
        if replaces:
            self.outer = top_saved_hooks(True)
            push_saved_hooks(self._pack, unpack)

    def close(self) -> None:
        self.owner = self.outer = None
        self.records.clear()
        if self._is_on_top:
            pop_saved_hooks()

    @property
    def _is_on_top(self) -> bool:
        top = top_saved_hooks(True)
        return top is not None and top[0] == self._pack

    def register(self, tensor: Tensor, rebuild: Callable[[], Tensor], calls: CheckedCalls) -> Rebuildable | None:
        """Replace saves of this tensor from now on; None where no scope is open, or the layer's output is written to.

        Also None under other hooks, as in a user's checkpoint: they own the saves, and may return them only once.
        """
        if calls.is_written or not self.is_open or not self._is_on_top:
            return None
        key, records = storage_id(tensor.untyped_storage()), self.records
        rebuildable = records[key] = Rebuildable(tensor, rebuild, lambda _: records.pop(key, None), calls)
        return rebuildable

    def keep(self, tensor: Tensor) -> None:
        """Save this tensor as it is, even if it is a layer's output: another layer recomputes from it."""
        if self.records:
            self.records.pop(storage_id(tensor.untyped_storage()), None)

    def _pack(self, tensor: Tensor) -> Any:
        if tensor.layout is torch.strided:
            rebuildable = self.records.get(storage_id(tensor.untyped_storage()))
            if rebuildable is not None and rebuildable.covers(tensor):
                return rebuildable.recipe(tensor)
        return save_as_is(tensor, self.outer)


scope = Scope()
