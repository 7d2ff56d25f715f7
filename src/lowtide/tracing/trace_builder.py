"""The record of a running step, and its frozen graph."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from lowtide.tracing.graph import BESIDE, Category, Graph, Op, Saved, Storage, TensorView
from lowtide.tracing.meter import Meter


@dataclass(slots=True)
class LiveStorage:
    """A storage while the step still runs."""

    bytes: int
    device: str
    dtype: str
    birth: int
    label: str
    module: str
    source: str
    category: Category = "temporary"
    shape: tuple[int, ...] = ()
    made_by: str = ""
    state_key: str = ""
    death: int = -1
    recomputed: bool = False
    is_outside: bool = False  # no op made it, and nobody has named it yet

    def name(
        self, category: Category, label: str, module: str, shape: tuple[int, ...] | None = None, state_key: str = ""
    ) -> None:
        self.category, self.label, self.module, self.is_outside = category, label, module, False
        self.shape, self.state_key = self.shape if shape is None else shape, state_key


@dataclass(slots=True)
class CallSite:
    """The place of an op's call: its name, its module and the user's line."""

    op: str
    module: str
    source: str


@dataclass(slots=True)
class LiveSave:
    storage: int
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    sequence: int
    source: str


@dataclass(slots=True)
class Record:
    """Recorded ops, storages and saved values of a step."""

    ops: list[Op] = field(default_factory=list)
    storages: list[LiveStorage] = field(default_factory=list)
    saves: list[LiveSave] = field(default_factory=list)
    places: dict[int, CallSite] = field(default_factory=dict)  # autograd sequence number -> the forward call

    def graph(
        self, meter: Meter, modules: dict[str, str], *, device: str, fake: bool, notes: tuple[str, ...] = ()
    ) -> Graph:
        """Freeze the step as a graph, with what a meter read of its ops."""
        self._own_what_stays()
        end = len(self.ops)
        storages: list[Storage] = []
        numbers: dict[int, int] = {}  # index here -> index in the graph
        for index, s in enumerate(self.storages):
            death = end if s.death < 0 else s.death
            category: Category = s.category
            if category == "temporary" and s.recomputed and self._outlives_recompute(s, death):
                category = "activation"
            if death > s.birth:
                numbers[index] = len(storages)
                owner = (s.label, s.module, s.source, s.shape, s.made_by, s.state_key)
                storages.append(Storage(len(storages), s.bytes, s.device, s.dtype, category, s.birth, death, *owner))
        saved = tuple(self._frozen_save(s, numbers) for s in self.saves if s.storage in numbers)
        named = tuple(modules.items())
        graph = Graph((), tuple(storages), saved, named, device, fake, meter.granularity, notes)
        readings = meter.readings(graph.live_bytes(allocated=True, ops=end), graph.static_bytes)
        if readings.held_bytes:
            label = "libraries' workspaces"
            where = graph.tensor_device
            held = Storage(len(storages), readings.held_bytes, where, "uint8", "workspace", 0, end, label, "", "")
            graph = replace(graph, storages=(*storages, held))
        ops: list[Op] = []
        for op, seconds, workspace_bytes in zip(self.ops, readings.seconds, readings.workspace_bytes, strict=True):
            views = {"inputs": _renumber(op.inputs, numbers), "outputs": _renumber(op.outputs, numbers)}
            ops.append(replace(op, seconds=seconds, workspace_bytes=workspace_bytes, **views))
        return replace(graph, ops=tuple(ops), other_bytes=readings.other_bytes)

    def _own_what_stays(self) -> None:
        """Own storages that no op made and that outlive the step, such as a mask of the loss or a module."""
        for storage in self.storages:
            if storage.is_outside and storage.death < 0:
                storage.name("buffer", BESIDE, storage.module)
                storage.birth = 0

    def _outlives_recompute(self, storage: LiveStorage, death: int) -> bool:
        return any(not op.recompute for op in self.ops[storage.birth + 1 : death])

    def _frozen_save(self, save: LiveSave, numbers: dict[int, int]) -> Saved:
        storage = self.storages[save.storage]
        needed = self.places.get(save.sequence, CallSite("", "", ""))
        origin = (storage.category, storage.made_by, storage.module)
        source = save.source or needed.source
        number = numbers[save.storage]
        return Saved(number, save.shape, save.dtype, save.bytes, *origin, needed.op, needed.module, source)


def _renumber(values: tuple[TensorView, ...], numbers: dict[int, int]) -> tuple[TensorView, ...]:
    if all(numbers.get(v.storage) == v.storage for v in values):
        return values
    return tuple(replace(v, storage=numbers[v.storage]) for v in values if v.storage in numbers)
