"""A profile: who holds the memory of a step, when and why. Pure functions over a traced graph."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from functools import cached_property
from typing import Any, Literal, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from lowtide.fingerprint import Fingerprint
from lowtide.sizes import format_size
from lowtide.tracing.graph import CATEGORIES, Category, Graph, Phase, Saved, Storage
from lowtide.version import __version__

Source = Literal["measured", "modelled", "none"]

JSON_VERSION = 1
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Usage:
    """The share of a module, or of a module with all below it."""

    parameter_bytes: int = 0
    saved_bytes: int = 0  # activations that it made and that are kept for the backward pass
    peak_bytes: int = 0  # bytes alive at the peak that it made or owns
    seconds: float = 0.0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.parameter_bytes + other.parameter_bytes,
            self.saved_bytes + other.saved_bytes,
            self.peak_bytes + other.peak_bytes,
            self.seconds + other.seconds,
        )


@dataclass(frozen=True, slots=True)
class ModuleUsage:
    """One row of the module tree: a module's own share, and the share of all below it too."""

    path: str
    type: str
    own: Usage
    total: Usage


@dataclass(frozen=True)
class Timeline:
    """Bytes alive while each op runs, by category; ``allocated`` is their sum as the allocator rounds it."""

    by_category: dict[Category, NDArray[np.int64]]
    allocated: NDArray[np.int64]
    storage: NDArray[np.int64]
    phase_starts: dict[Phase, int]


@dataclass(frozen=True, slots=True)
class Outside:
    """On CUDA: what nvidia-smi shows above the allocated bytes. Zero where it could not be read."""

    reserved_bytes: int  # taken from the driver by PyTorch's allocator, at its peak
    context_bytes: int  # this process's CUDA context and libraries
    other_bytes: int  # other processes on the GPU
    device_bytes: int  # the GPU's memory


class Findings:
    """Results that techniques and planning derived from a step, for plans of several budgets: one of each class."""

    def __init__(self) -> None:
        self._kept: dict[type, Any] = {}

    def get(self, kind: type[T]) -> T | None:
        """The result of this class, if there is one."""
        return self._kept.get(kind)

    def keep(self, found: T) -> T:
        """Put a result in the place of an earlier one of its class, and return it."""
        self._kept[type(found)] = found
        return found


@dataclass(frozen=True)
class Profile:
    """The memory of one training step, by owner and time. ``print`` it, ``to_json()`` it, or ``lowtide.report`` it."""

    name: str
    graph: Graph
    hardware: str
    seconds_source: Source
    workspace_source: Source
    versions: dict[str, str]
    outside: Outside | None = None
    fingerprint: Fingerprint | None = None  # of the step; None where it is not known
    findings: Findings = field(default_factory=Findings, init=False, compare=False, repr=False)

    @property
    def peak_bytes(self) -> int:
        """The allocated peak: what budgets are about."""
        return self.graph.peak_bytes

    @property
    def storage_peak_bytes(self) -> int:
        """The peak of storages at op boundaries: exact."""
        return self.graph.storage_peak_bytes

    @property
    def static_bytes(self) -> int:
        """Bytes that stay between steps: parameters, buffers, optimizer state, and the batch."""
        return self.graph.static_bytes

    @property
    def other_bytes(self) -> int:
        """Held by other tensors of this process while a real step ran on a GPU; no peak counts them."""
        return self.graph.other_bytes

    @property
    def peak_op(self) -> int:
        """Index of the op that runs at the peak."""
        return self.graph.peak_op

    @cached_property
    def seconds(self) -> float:
        """Seconds of all ops together; nan where nothing measured or modelled them."""
        return float(sum(op.seconds for op in self.graph.ops))

    @cached_property
    def by_category(self) -> dict[Category, int]:
        """Bytes of each category at the allocated peak."""
        return {c: int(live[self.peak_op]) for c, live in self.timeline.by_category.items() if len(live)}

    @cached_property
    def timeline(self) -> Timeline:
        """Bytes over the step, by category."""
        graph = self.graph
        return Timeline(
            by_category={c: graph.live_bytes(c, allocated=True) for c in CATEGORIES},
            allocated=graph.live_bytes(allocated=True),
            storage=graph.live_bytes(),
            phase_starts=graph.phase_starts(),
        )

    @cached_property
    def alive_at_peak(self) -> list[Storage]:
        """Storages alive at the peak, largest first."""
        return self.graph.alive_at(self.peak_op)

    @property
    def saved(self) -> tuple[Saved, ...]:
        """Every tensor that an op saved for its backward, parameters included."""
        return self.graph.saved

    @cached_property
    def saved_bytes(self) -> int:
        """Activations kept for the backward pass, each storage once."""
        return sum(s.bytes for s in self.graph.on_device if s.id in self._saved_storages)

    @cached_property
    def _saved_storages(self) -> set[int]:
        return {s.storage for s in self.saved if s.category == "activation"}

    @cached_property
    def by_module(self) -> tuple[ModuleUsage, ...]:
        """The module tree in the model's order: each module's own share and its total."""
        own = {path: Usage() for path, _ in self.graph.modules}
        own.setdefault("", Usage())

        def charge(path: str, usage: Usage) -> None:
            while path not in own:  # a module that the model does not list: its nearest parent pays
                path = path.rpartition(".")[0]
            own[path] += usage

        for s in self.graph.on_device:
            alive = s.birth <= self.peak_op < s.death
            charge(
                s.module,
                Usage(
                    parameter_bytes=s.bytes if s.category == "parameter" else 0,
                    saved_bytes=s.bytes if s.id in self._saved_storages else 0,
                    peak_bytes=s.bytes if alive else 0,
                ),
            )
        for op in self.graph.ops:
            if not math.isnan(op.seconds):
                charge(op.module, Usage(seconds=op.seconds))
        total = dict(own)
        for path in sorted(own, key=lambda p: p.count(".") if p else -1, reverse=True):
            if path:
                total[_parent(path, own)] += total[path]
        return tuple(ModuleUsage(path, kind, own[path], total[path]) for path, kind in self.graph.modules)

    def to_json(self) -> dict[str, Any]:
        """The profile as JSON-ready data; ``docs/json.md`` describes the fields."""
        graph, timeline = self.graph, self.timeline
        data = {
            "version": JSON_VERSION,
            "lowtide": __version__,
            "name": self.name,
            "device": graph.device,
            "hardware": self.hardware,
            "versions": self.versions,
            "fake": graph.fake,
            "peak_bytes": self.peak_bytes,
            "storage_peak_bytes": self.storage_peak_bytes,
            "static_bytes": self.static_bytes,
            "other_bytes": self.other_bytes,
            "saved_bytes": self.saved_bytes,
            "seconds": self.seconds,
            "seconds_source": self.seconds_source,
            "workspace_source": self.workspace_source,
            "peak_op": self.peak_op,
            "by_category": self.by_category,
            "by_module": self.by_module,
            "saved": self.saved,
            "alive_at_peak": self.alive_at_peak,
            "timeline": {
                "phase_starts": timeline.phase_starts,
                "allocated": timeline.allocated.tolist(),
                "storage": timeline.storage.tolist(),
                "by_category": {c: live.tolist() for c, live in timeline.by_category.items()},
            },
            "ops": [
                {
                    "name": op.name,
                    "phase": op.phase,
                    "module": op.module,
                    "source": op.source,
                    "recompute": op.recompute,
                    "seconds": op.seconds,
                    "workspace_bytes": op.workspace_bytes,
                }
                for op in graph.ops
            ],
            "outside": self.outside,
            "notes": graph.notes,
        }
        return json_ready(data)

    def compare(self, other: Profile) -> Comparison:
        """Set another profile of the same step, made after a change, beside this one."""
        return Comparison(self, other)

    def __str__(self) -> str:
        graph, storage, saved = self.graph, self.storage_peak_bytes, self.saved_bytes
        where = graph.ops[self.peak_op] if graph.ops else None
        lines = [
            f"{self.name or 'step'} on {self.hardware}{' (predicted without running)' if graph.fake else ''}",
            f"  allocated peak {format_size(self.peak_bytes):>10}   storage peak       {format_size(storage):>10}",
            f"  static         {format_size(self.static_bytes):>10}   saved for backward {format_size(saved):>10}",
        ]
        if where:
            lines.append(f"  the peak is in {where.phase}: {where.name} in {where.module or 'the model'}")
        lines += [
            f"    {category:<16}{format_size(size):>10}  {size / max(self.peak_bytes, 1):>4.0%}"
            for category, size in self.by_category.items()
            if size
        ]
        if self.other_bytes:
            lines.append(f"  not counted: {format_size(self.other_bytes)} of other tensors in this process")
        return "\n".join(lines)


@dataclass(frozen=True)
class Comparison:
    """Two profiles of the same step, before and after a change."""

    before: Profile
    after: Profile

    @property
    def saved_bytes(self) -> int:
        """Bytes by which the allocated peak fell; negative if it rose."""
        return self.before.peak_bytes - self.after.peak_bytes

    def rows(self) -> list[tuple[str, int, int]]:
        """Name, bytes before, bytes after: the peaks, then each category at the peak."""
        before, after = self.before, self.after
        rows = [
            ("allocated peak", before.peak_bytes, after.peak_bytes),
            ("storage peak", before.storage_peak_bytes, after.storage_peak_bytes),
            ("saved for backward", before.saved_bytes, after.saved_bytes),
        ]
        return rows + [(c, before.by_category.get(c, 0), after.by_category.get(c, 0)) for c in CATEGORIES]

    def __str__(self) -> str:
        lines = [f"{'':<20}{'before':>12}{'after':>12}{'change':>12}"]
        lines += [
            f"{name:<20}{format_size(a):>12}{format_size(b):>12}{format_size(b - a):>12}"
            for name, a, b in self.rows()
            if a or b
        ]
        return "\n".join(lines)


def _parent(path: str, known: dict[str, Usage]) -> str:
    while True:
        path = path.rpartition(".")[0]
        if path in known:
            return path


def json_ready(value: Any) -> Any:
    """Dataclasses, containers and enums as JSON holds them; numbers that are not finite become None."""
    if is_dataclass(value):
        return {field.name: json_ready(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, dict):
        return {key: json_ready(item) for key, item in cast(dict[str, Any], value).items()}
    if isinstance(value, list | tuple | frozenset):
        items = sorted(value) if isinstance(value, frozenset) else value
        return [json_ready(item) for item in cast(Iterable[Any], items)]
    if isinstance(value, Enum):
        return value.value
    return None if isinstance(value, float) and not math.isfinite(value) else value
