"""The graph of a training step: its ops, and the storages they make, hold and free."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray

Phase = Literal["forward", "backward", "optimizer"]
# An activation is made in the forward pass, or by recomputation, and kept for the backward pass. A workspace is
# allocated inside kernels, and never part of the storage peak. Anything else that an op returns is temporary.
Category = Literal[
    "parameter", "gradient", "optimizer state", "buffer", "input", "activation", "temporary", "workspace"
]

PHASES: tuple[Phase, ...] = get_args(Phase)
CATEGORIES: tuple[Category, ...] = get_args(Category)
BESIDE = "held beside model and batch"  # the label of such a tensor: the loss holds it
STATIC: frozenset[Category] = frozenset({"parameter", "optimizer state", "buffer", "input"})


@dataclass(frozen=True, slots=True)
class TensorView:
    """A tensor as an op sees it: a window on a storage."""

    storage: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        """Bytes of the elements; the storage may hold more."""
        return math.prod(self.shape) * getattr(torch, self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class Storage:
    """Bytes with one lifetime. Views, in-place results and tensors saved twice share one.

    Alive while ops ``birth`` to ``death - 1`` run; ``death`` is ``len(ops)`` for what outlives the step.
    """

    id: int
    bytes: int
    device: str
    dtype: str
    category: Category
    birth: int
    death: int
    label: str  # for people: the parameter's name, or the op and the shape
    module: str  # path of the module that made or owns it
    source: str  # file:line of the user's code that made it
    shape: tuple[int, ...] = ()  # of the tensor that it was made or owned as
    made_by: str = ""  # the op that made it, "" for parameters and inputs
    state_key: str = ""  # of optimizer state: its key in the optimizer, such as "exp_avg"


@dataclass(frozen=True, slots=True)
class Op:
    """One operator call, with what it read and returned."""

    index: int
    name: str
    phase: Phase
    module: str
    source: str
    inputs: tuple[TensorView, ...]
    outputs: tuple[TensorView, ...]
    arguments: str  # the arguments that are not tensors, as text for the signature alone
    recompute: bool  # a forward op run again in the backward pass
    seconds: float  # nan where not measured
    workspace_bytes: int  # allocated inside the kernel above its outputs, and freed by its end
    own_generator: bool = False  # it, or the code around it, draws from other generators than torch's default ones
    is_random: bool = False  # it draws random numbers
    is_training: bool = False  # it was called for training, as a batch norm that takes its batch's statistics

    @property
    def kernel(self) -> str:
        """The op in any overload, in place or not: see ``kernel_of``."""
        return kernel_of(self.name)

    @property
    def signature(self) -> str:
        """Key that determines the kernel: the op, shapes, strides and dtypes, the other arguments."""
        return signature(self.name, self.inputs, self.arguments)


@cache
def kernel_of(op: str) -> str:
    """An op without its overload, in place or not.

    >>> kernel_of("aten.relu_.default"), kernel_of("lowtide.fewbit.default")
    ('aten.relu', 'lowtide.fewbit')
    """
    return ".".join(op.split(".")[:2]).removesuffix("_")


def signature(name: str, inputs: Sequence[TensorView], arguments: str) -> str:
    """An op's signature from its parts."""
    values = ", ".join(f"{v.dtype}{list(v.shape)}{list(v.stride)}" for v in inputs)
    return f"{name}({values}; {arguments})"


@dataclass(frozen=True, slots=True)
class Saved:
    """A tensor that an op saved for its backward."""

    storage: int
    shape: tuple[int, ...]
    dtype: str
    bytes: int  # of the tensor; its storage may be larger, and is counted once
    category: Category
    made_by: str  # the op that made it, "" for parameters and inputs
    made_in: str  # the module that made or owns it
    needed_by: str  # the op whose backward needs it
    needed_in: str
    source: str  # file:line where it was saved


@dataclass(frozen=True)
class Graph:
    """A traced step. Storages live on several devices; peaks are about ``device`` alone."""

    ops: tuple[Op, ...]
    storages: tuple[Storage, ...]
    saved: tuple[Saved, ...]
    modules: tuple[tuple[str, str], ...]  # path and class of every module, the model itself first, as ("", "ResNet")
    device: str  # "cpu", "cuda", or the device that was predicted: "h200"
    fake: bool
    granularity: int = 1  # the allocator rounds every storage up to a multiple of this
    notes: tuple[str, ...] = ()
    other_bytes: int = 0  # on a GPU: tensors of the process beside the step's, which no peak counts

    @cached_property
    def on_device(self) -> tuple[Storage, ...]:
        """The storages that count: those on the traced device."""
        return tuple(s for s in self.storages if s.device == self.tensor_device)

    @property
    def tensor_device(self) -> str:
        """``cpu`` or ``cuda``: what the tensors' own device says."""
        return "cpu" if self.device == "cpu" else "cuda"

    @cached_property
    def last_forward_use(self) -> dict[int, int]:
        """By storage, the last op of the forward pass that reads or gives it."""
        ops = (op for op in self.ops if op.phase == "forward")
        return {value.storage: op.index for op in ops for value in (*op.inputs, *op.outputs)}

    @cached_property
    def first_backward_use(self) -> dict[int, int]:
        """By storage, the first op of the backward pass that reads it."""
        ops = (op for op in reversed(self.ops) if op.phase == "backward")
        return {value.storage: op.index for op in ops for value in op.inputs}

    @cached_property
    def savers(self) -> dict[int, set[str]]:
        """By storage, the modules that save it for their backward."""
        savers: dict[int, set[str]] = {}
        for saved in self.saved:
            savers.setdefault(saved.storage, set()).add(saved.needed_in)
        return savers

    @cached_property
    def gradient_ends(self) -> dict[int, int]:
        """By storage of a gradient, the op of the backward pass that completes it."""
        ends = {storage.id: storage.birth for storage in self.on_device if storage.category == "gradient"}
        for op in self.ops:
            if op.phase == "backward":
                ends |= {
                    v.storage: max(ends[v.storage], op.index) for v in (*op.inputs, *op.outputs) if v.storage in ends
                }
        return ends

    def live_bytes(self, *categories: Category, allocated: bool = False, ops: int | None = None) -> NDArray[np.int64]:
        """Bytes alive while each op runs, its outputs included; of some categories, or of all.

        Storage bytes by default; with ``allocated``, rounded as the allocator rounds them, and with workspaces.
        """
        chosen = categories or CATEGORIES
        change = np.zeros((len(self.ops) if ops is None else ops) + 1, dtype=np.int64)
        for s in self.on_device:
            if s.category in chosen and (allocated or s.category != "workspace"):
                size = self.rounded(s.bytes) if allocated else s.bytes
                change[s.birth] += size
                change[s.death] -= size
        live = np.cumsum(change)[:-1]
        if allocated and "workspace" in chosen and self.ops:
            live += np.fromiter((op.workspace_bytes for op in self.ops), np.int64, len(self.ops))
        return live

    @property
    def beside_bytes(self) -> int:
        """Bytes of tensors that the loss holds beside model and batch."""
        return sum(self.rounded(storage.bytes) for storage in self.on_device if storage.label == BESIDE)

    def rounded(self, size: int) -> int:
        """A size as the allocator rounds it."""
        return -(-size // self.granularity) * self.granularity

    @cached_property
    def storage_peak_bytes(self) -> int:
        """The most bytes that storages hold at once: exact."""
        return int(max(self.live_bytes(), default=0))

    @cached_property
    def peak_bytes(self) -> int:
        """The most bytes allocated at once: storages and what kernels allocate inside themselves."""
        return int(max(self.live_bytes(allocated=True), default=0))

    @cached_property
    def peak_op(self) -> int:
        """Index of the op that runs at the allocated peak."""
        return int(np.argmax(self.live_bytes(allocated=True))) if self.ops else 0

    @property
    def static_bytes(self) -> int:
        """Bytes in memory between steps: parameters, buffers, optimizer state, and the batch."""
        return sum(self.rounded(s.bytes) for s in self.on_device if s.category in STATIC and s.birth == 0)

    def alive_at(self, op: int) -> list[Storage]:
        """The storages alive while an op runs, largest first."""
        alive = (s for s in self.on_device if s.birth <= op < s.death)
        return sorted(alive, key=lambda s: s.bytes, reverse=True)

    @property
    def loss_seconds(self) -> float:
        """The sum of the seconds of forward and backward, as far as they are known."""
        return sum(op.seconds for op in self.ops if op.phase != "optimizer" and math.isfinite(op.seconds))

    def phase_starts(self) -> dict[Phase, int]:
        """Index of the first op of each phase that has any."""
        starts: dict[Phase, int] = {}
        for op in self.ops:
            starts.setdefault(op.phase, op.index)
        return starts


def handed_on(graph: Graph) -> tuple[Saved, ...]:
    """Activations that a program's forward pass leaves for its backward pass."""
    start = graph.phase_starts().get("backward", len(graph.ops))
    return tuple(
        Saved(s.id, (), s.dtype, s.bytes, s.category, s.made_by, s.module, "", "", s.source)
        for s in graph.storages
        if s.category == "activation" and s.birth < start < s.death
    )
