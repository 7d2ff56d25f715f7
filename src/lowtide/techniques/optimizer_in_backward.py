"""The optimizer inside backward, as a technique: gradients are never all alive."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from lowtide.compat.optimizers import all_step_hooks
from lowtide.errors import LowtideError
from lowtide.optim.hooks import takes_one_at_a_time
from lowtide.optim.in_backward import step_in_backward
from lowtide.profiling.profile import Profile
from lowtide.techniques.technique import Check, Config, Fidelity, Interval, Kind, Option, Price, Technique, whole_step
from lowtide.tracing.graph import Graph, Storage
from lowtide.undo import Applied
from lowtide.workload import Workload

_SECONDS_A_PARAMETER = 100e-6  # of Python and launches, where one step of all would share them


class OptimizerInBackward(Technique):
    """Each parameter is stepped as soon as its gradient is complete.

    The parameters after a step are a plain step's, bit for bit. But no gradients are left to read, clip or accumulate
    before the step: loops that do so plan with ``forbid="optimizer_in_backward"``.
    """

    name = "optimizer_in_backward"
    kind: Kind = "step"
    config: type[Config] = Config
    needs = "an optimizer, and two or more parameters that get a gradient"

    def options(self, profile: Profile) -> list[Option]:
        """One, for the whole step."""
        graph = profile.graph
        steps = "optimizer" in graph.phase_starts()
        return [Option(self.name, ("",))] if steps and len(graph.gradient_ends) > 1 else []

    def price(self, option: Option, profile: Profile) -> Price:
        """A gradient dies when it is complete, and the optimizer's temporaries are of one parameter at a time."""
        graph = profile.graph
        gradients = [(graph.storages[storage], whole) for storage, whole in graph.gradient_ends.items()]
        removed = [Interval(g.bytes, whole + 1, g.death, "a gradient, freed") for g, whole in gradients]
        first = graph.phase_starts().get("optimizer", len(graph.ops))
        passing = [s for s in graph.on_device if s.category == "temporary" and s.birth >= max(first, 1)]
        removed += [Interval(s.bytes, s.birth, s.death, "a temporary of the optimizer") for s in passing]
        share = _temporary_share(graph, passing, [g.bytes for g, _ in gradients], first)
        added = (Interval(int(share * g.bytes), whole, whole + 1, "a step's temporaries") for g, whole in gradients)
        seconds = len(gradients) * _SECONDS_A_PARAMETER
        return Price(Fidelity.BITWISE, added=tuple(added), removed=tuple(removed), compute_seconds=seconds)

    def inside(self, work: Workload, option: Option) -> Workload:
        """The loss of the step itself."""
        return work

    def apply(self, work: Workload, options: Sequence[Option]) -> Applied:
        """Put the step on the parameters; the optimizer stays the same object. Without one there is nothing to do."""
        whole_step(options)
        if work.optimizer is None:
            return Applied(work)
        for hook in _hooks_of_others(work.optimizer):
            raise LowtideError(
                f"The optimizer has a step hook, which may read gradients ({getattr(hook, '__qualname__', hook)})",
                hint="Remove it, or change gradients in hooks of the parameters.",
            )
        return Applied(work, step_in_backward(work.optimizer))

    def check(self, option: Option) -> Check:
        """The parameters are a plain step's; no gradients are left to compare."""
        return Check(Fidelity.BITWISE, leaves_gradients=False)


def _hooks_of_others(optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    """Hooks around steps that do not know of steps in backward: all gradients would not be there for them."""
    hooks = (hook for hooks in all_step_hooks([optimizer]) for hook in hooks.values())
    return (hook for hook in hooks if not takes_one_at_a_time(hook))


def _temporary_share(graph: Graph, passing: Sequence[Storage], sizes: Sequence[int], first: int) -> float:
    """Bytes of temporaries for each byte of a gradient that is stepped."""
    change = np.zeros(len(graph.ops) + 1, np.int64)
    for storage in passing:
        change[storage.birth] += storage.bytes
        change[storage.death] -= storage.bytes
    at_once = any(
        op.kernel.startswith("aten._foreach_") for op in graph.ops[first:]
    )  # of all parameters, or of one after another
    return int(np.cumsum(change).max()) / max(sum(sizes) if at_once else max(sizes, default=0), 1)
