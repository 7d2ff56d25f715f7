"""Gradients that wait for the optimizer in 16 or 8 bits, as a technique."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lowtide.optim.gradients import PIECES, Bits, packed_bytes, store_gradients
from lowtide.profiling.profile import Profile
from lowtide.techniques.technique import Check, Config, Fidelity, Interval, Kind, Option, Price, whole_step
from lowtide.tracing.graph import Storage
from lowtide.undo import Applied
from lowtide.workload import Workload

_SIZES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
_BITS: tuple[Bits, ...] = ("16bit", "8bit")
_ROUNDING = {"16bit": 14, "8bit": 16}  # bytes for each value of the piece that is being rounded


@dataclass(frozen=True)
class StoredGradientsConfig(Config):
    """The form of a stored gradient."""

    bits: Bits

    def __post_init__(self) -> None:
        self.require_one_of("bits", _BITS)


class StoredGradients:
    """Each gradient is packed when it is complete, and unpacked when its parameter is stepped.

    Stored values are right on average. But no gradients are left to read or clip before the step. The fidelity is
    therefore ``changed``: plans use it only on request. Unlike a step in backward, it allows several backward passes to
    one step.
    """

    name = "stored_gradients"
    kind: Kind = "step"
    config: type[Config] = StoredGradientsConfig
    needs = "an optimizer, and two or more parameters that get a gradient"
    conflicts: Mapping[str, str] = {"optimizer_in_backward": "a step in backward leaves no gradients to store"}

    def options(self, profile: Profile) -> list[Option]:
        """16 and 8 bits, where that is less than the gradients have."""
        graph = profile.graph
        gradients = [graph.storages[id] for id in graph.gradient_ends]
        if "optimizer" not in graph.phase_starts() or len(gradients) < 2:
            return []
        return [
            Option(self.name, ("",), StoredGradientsConfig(bits))
            for bits in _BITS
            if any(_packed(gradient, bits) < gradient.bytes for gradient in gradients)
        ]

    def price(self, option: Option, profile: Profile) -> Price:
        """A gradient is packed from when it is complete; the step has one of them whole, the largest at the most."""
        bits, graph, end = option.config_as(StoredGradientsConfig).bits, profile.graph, len(profile.graph.ops)
        removed: list[Interval] = []
        added: list[Interval] = []
        for id, whole in graph.gradient_ends.items():
            gradient = graph.storages[id]
            label, start, death = gradient.label, whole + 1, gradient.death
            rounding = gradient.bytes + _ROUNDING[bits] * min(_count(gradient), PIECES[graph.tensor_device])
            removed.append(Interval(gradient.bytes, start, death, f"{label}, freed"))
            added.append(Interval(_packed(gradient, bits), start, death, f"{label} in {bits}"))
            added.append(Interval(rounding, start, min(start + 1, death), f"{label} while it is rounded"))
        first = graph.phase_starts().get("optimizer", end) + 1  # on its first op falls the rounding of the last one
        largest = max((4 * _count(graph.storages[id]) for id in graph.gradient_ends), default=0)
        added.append(Interval(largest, first, end, "a gradient, unpacked"))
        return Price(Fidelity.CHANGED, added=tuple(added), removed=tuple(removed))

    def inside(self, work: Workload, option: Option) -> Workload:
        """The loss of the step itself."""
        return work

    def apply(self, work: Workload, options: Sequence[Option]) -> Applied:
        """Put the store between backward and the optimizer's step. Without an optimizer there is nothing to do."""
        bits = whole_step(options).config_as(StoredGradientsConfig).bits
        return Applied(work) if work.optimizer is None else Applied(work, store_gradients(work.optimizer, bits))

    def check(self, option: Option) -> Check:
        """The step is one of rounded gradients; none are left to compare."""
        return Check(Fidelity.CHANGED, leaves_gradients=False)


def _packed(gradient: Storage, bits: Bits) -> int:
    return packed_bytes(_count(gradient), bits)


def _count(gradient: Storage) -> int:
    return gradient.bytes // _SIZES.get(gradient.dtype, 4)
