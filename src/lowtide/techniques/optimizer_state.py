"""Optimizer states that take less of the device, as a technique: in 8 bits, in 4, or on the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from lowtide.optim.adamw8bit import LEAST
from lowtide.optim.state import KINDS, lower_state
from lowtide.profiling.profile import Profile
from lowtide.techniques.technique import Check, Config, Fidelity, Interval, Kind, Option, Price, Technique, whole_step
from lowtide.tracing.graph import Storage
from lowtide.undo import Applied
from lowtide.workload import Workload

_MOMENTS, _MOMENTUM = ("exp_avg", "exp_avg_sq"), "momentum_buffer"
_BYTES = {"8bit": 1 + 4 / 256, "4bit": 0.5 + 4 / 128}  # of a value, with its share of the block's scale
_PINNED_COPIES = 55e9  # bytes a second, each way, where the profile knows no better


@dataclass(frozen=True)
class OptimizerStateConfig(Config):
    """The form of the states: in 8 bits, in 4, or on the host."""

    state: str

    def __post_init__(self) -> None:
        self.require_one_of("state", KINDS)


class OptimizerState(Technique):
    """Moments in 8 or 4 bits, or any optimizer's state on the host.

    Adam's and AdamW's are lowtide's own in 8 bits and torchao's in 4, SGD's momentum is bitsandbytes' in 8.
    """

    name = "optimizer_state"
    kind: Kind = "step"
    config: type[Config] = OptimizerStateConfig
    needs = f"moments of Adam, AdamW or SGD of {LEAST} values or more, or an optimizer with a state on a GPU"

    def options(self, profile: Profile) -> list[Option]:
        """One for each kind that would save something."""
        kinds = [kind for kind in KINDS if any(True for _ in _lowered(profile, kind))]
        return [Option(self.name, ("",), OptimizerStateConfig(kind)) for kind in kinds]

    def price(self, option: Option, profile: Profile) -> Price:
        """Bytes that the states free over the whole step; from the host they are fetched and stored again."""
        kind, end = option.config_as(OptimizerStateConfig).state, len(profile.graph.ops)
        removed = tuple(
            Interval(storage.bytes - lowered_bytes, 0, end, f"{storage.label} in {kind}")
            for storage, lowered_bytes in _lowered(profile, kind)
        )
        if kind != "cpu":
            return Price(Fidelity.CHANGED, removed=removed)
        moved = sum(interval.bytes for interval in removed)
        sizes = sorted((profile.graph.rounded(interval.bytes) for interval in removed), reverse=True)
        first = profile.graph.phase_starts().get("optimizer", end - 1)
        return Price(
            Fidelity.BITWISE,
            added=(Interval(sum(sizes[:4]), first, end, "states of two parameters, fetched"),),
            removed=removed,
            h2d_seconds=moved / _PINNED_COPIES,
            d2h_seconds=moved / _PINNED_COPIES,
            host_bytes=moved,
        )

    def inside(self, work: Workload, option: Option) -> Workload:
        """The loss of the step itself."""
        return work

    def apply(self, work: Workload, options: Sequence[Option]) -> Applied:
        """Change the optimizer in place; refused where it has no such states. Without one there is nothing to do."""
        kind = whole_step(options).config_as(OptimizerStateConfig).state
        return Applied(work) if work.optimizer is None else Applied(work, lower_state(work.optimizer, kind))

    def check(self, option: Option) -> Check:
        """The gradients are the plain step's; on the host the parameters after the step too."""
        is_on_host = option.config_as(OptimizerStateConfig).state == "cpu"
        return Check(Fidelity.BITWISE if is_on_host else Fidelity.CHANGED)


def _lowered(profile: Profile, kind: str) -> Iterator[tuple[Storage, int]]:
    """The states that would be lowered, with the bytes that they would still take on the device."""
    graph = profile.graph
    states = [s for s in graph.on_device if s.category == "optimizer state"]
    keys = {s.state_key for s in states}
    if kind == "cpu":
        if graph.tensor_device == "cuda":
            yield from ((s, 0) for s in states if s.bytes > 8)
        return
    library = {"4bit": "torchao"}.get(kind)
    moments = _MOMENTS
    if keys == {_MOMENTUM} and kind == "8bit":  # of SGD
        library, moments = "bitsandbytes", (_MOMENTUM,)
    is_known = keys <= {"step", *moments} and keys >= set(moments)
    if not is_known or (library is not None and find_spec(library) is None):
        return
    for storage in states:
        size = {"float32": 4, "bfloat16": 2, "float16": 2}.get(storage.dtype, 0)
        if size and storage.state_key in moments and storage.bytes // size >= LEAST:
            yield storage, round(storage.bytes // size * _BYTES[kind])
