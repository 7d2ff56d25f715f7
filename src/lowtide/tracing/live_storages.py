"""Storages of a running step, followed from birth to death by weak references."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor

from lowtide.compat.tensors import storage_id
from lowtide.tracing.call_sites import short_name
from lowtide.tracing.dense_parts import address, dtype_name
from lowtide.tracing.graph import Category
from lowtide.tracing.trace_builder import CallSite, LiveStorage, Record

_ZEROS = "aten._efficientzerotensor.default"  # which no bytes hold, such as the gradient of ``sgn``


class LiveStorages:
    """Adds storages to a record, and notes when they die. It keeps no tensor alive."""

    def __init__(self, record: Record, modules: list[str]) -> None:
        self._record = record
        self._modules = modules  # that are running, innermost last
        self._alive: dict[int, int] = {}  # address of a living storage -> index in the record's storages
        self._watch: dict[int, weakref.ref[Any]] = {}

    def index(self, tensor: Tensor) -> int | None:
        """Return the index of a tensor's storage, or None where the step has not seen it."""
        return self._alive.get(address(tensor))

    def get(self, tensor: Tensor) -> LiveStorage | None:
        """Return the storage of a tensor, or None where the step has not seen it."""
        index = self.index(tensor)
        return None if index is None else self._record.storages[index]

    def see(self, tensor: Tensor, *, label: str = "", birth: int | None = None, place: CallSite | None = None) -> int:
        """Return the index of a tensor's storage. A new or resized storage starts a lifetime now."""
        untyped = tensor.untyped_storage()
        where, size = storage_id(untyped), untyped.nbytes()
        birth = len(self._record.ops) if birth is None else birth
        index = self._alive.get(where)
        if index is not None:
            known = self._record.storages[index]
            if known.bytes == size or known.made_by == _ZEROS:
                return index
            known.death = birth
        if place is not None:
            label = f"{short_name(place.op)} {list(tensor.shape)}"
            size = 0 if place.op == _ZEROS else size
        index = len(self._record.storages)
        self._record.storages.append(
            LiveStorage(
                bytes=size,
                device=tensor.device.type,
                dtype=dtype_name(tensor),
                birth=birth,
                label=label or "made outside of ops",
                module=place.module if place else (self._modules[-1] if self._modules else ""),
                source=place.source if place else "",
                shape=tuple(tensor.shape),
                made_by=place.op if place else "",
                is_outside=not label,
            )
        )
        if where not in self._watch:
            self._watch[where] = weakref.ref(untyped, lambda _: self._died(where))
        self._alive[where] = index
        return index

    def _died(self, where: int) -> None:
        self._watch.pop(where, None)
        index = self._alive.pop(where, None)
        if index is not None:
            self._record.storages[index].death = len(self._record.ops)

    def name(
        self,
        tensor: Tensor,
        category: Category,
        label: str,
        module: str,
        shape: tuple[int, ...] | None = None,
        state_key: str = "",
    ) -> None:
        """Name a living storage. The first owner names a shared one."""
        storage = self.get(tensor)
        if storage is not None and storage.category in ("temporary", "activation"):
            storage.name(category, label, module or storage.module, shape, state_key)

    def forget(self, tensor: Tensor) -> None:
        """Leave a storage out of the step."""
        index = self._alive.pop(address(tensor), None)
        if index is not None:
            self._record.storages[index].death = self._record.storages[index].birth

    def keep_for_backward(self) -> None:
        """Make activations of the temporaries that are alive."""
        for index in self._alive.values():
            if self._record.storages[index].category == "temporary":
                self._record.storages[index].category = "activation"

    def stop(self, *, constants: bool) -> list[tuple[str, weakref.ref[Any]]]:
        """Stop following. Return labels of, and references to, living storages that ops of the step made.

        Constants, which depend on neither parameters nor batch, are included only with ``constants``.
        """
        alive = {index: where for where, index in self._alive.items() if self._record.storages[index].made_by}
        if alive and not constants:
            alive = {index: alive[index] for index in alive.keys() & self._from_data()}
        living = [(self._record.storages[index].label, self._watch[where]()) for index, where in alive.items()]
        self._watch.clear()
        return [(label, weakref.ref(storage)) for label, storage in living if storage is not None]

    def _from_data(self) -> set[int]:
        """Find the storages of parameters and the batch, and all that ops computed from them."""
        storages = {i for i, each in enumerate(self._record.storages) if each.category in ("parameter", "input")}
        for op in self._record.ops:
            if any(value.storage in storages for value in op.inputs):
                storages.update(value.storage for value in op.outputs)
        return storages
