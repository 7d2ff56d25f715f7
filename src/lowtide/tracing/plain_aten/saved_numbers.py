"""Python numbers that autograd saves for the backward pass, as in ``0.5 * x``.

On a CPU each is a tensor of one element. No op makes it and saved-tensor hooks do not see it.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor

from lowtide.compat.autograd import saved_value, sequence_number
from lowtide.tracing.trace_builder import LiveStorage, Record

_DTYPES = {float: ("float64", 8), int: ("int64", 8), bool: ("bool", 1), complex: ("complex128", 16)}


class KeptNumbers:
    """Follows the numbers of a record's ops from the op that keeps them until its autograd node runs or dies.

    While an op runs, its own number is among the bytes that it allocates inside itself.
    """

    def __init__(self, record: Record) -> None:
        self._record = record
        self._last: tuple[weakref.ref[Tensor], type, str, str] | None = None
        self._numbers: dict[int, int] = {}  # sequence number of the autograd node -> index in the record's storages
        self._owners: dict[int, weakref.ref[_Owner]] = {}

    def note(self, args: tuple[Any, ...], out: Any) -> None:
        """Look at an op that was just recorded. Its autograd node is known when the next one is dispatched."""
        self.settle()
        if len(args) > 1 and type(args[1]) in _DTYPES and isinstance(out, Tensor) and out.device.type == "cpu":
            op = self._record.ops[-1]
            self._last = weakref.ref(out), type(args[1]), op.module, op.source

    def settle(self) -> None:
        """Count the number of the last op, if its node keeps one."""
        if self._last is None:
            return
        (reference, kind, module, source), self._last = self._last, None
        out = reference()
        node: Any = None if out is None else out.grad_fn
        if not isinstance(saved_value(node, "other", None), Tensor):  # a scalar overload keeps no tensor
            return
        dtype, size = _DTYPES[kind]
        index = len(self._record.storages)
        birth = len(self._record.ops)
        storage = LiveStorage(size, "cpu", dtype, birth, "Python number", module, source, "activation")
        self._record.storages.append(storage)
        owner = _Owner()
        node.metadata["lowtide.number"] = owner  # which dies with the node
        self._owners[index] = weakref.ref(owner, lambda _: self._end(index))
        self._numbers[sequence_number(node)] = index

    def run(self, number: int) -> None:
        """Tell that the node with this sequence number runs: its formula reads the number."""
        if number in self._numbers:
            self._end(self._numbers.pop(number))

    def _end(self, index: int) -> None:
        storage = self._record.storages[index]
        if storage.death < 0:
            storage.death = len(self._record.ops)


class _Owner:
    """Lives as long as an autograd node."""

    __slots__ = ("__weakref__",)
