"""The optimizer inside backward, as a technique: gradients are never all alive."""

from __future__ import annotations

from collections.abc import Sequence

from lowtide.optim.in_backward import step_in_backward
from lowtide.profiling.profile import Profile
from lowtide.techniques.technique import Check, Config, Fidelity, Interval, Kind, Option, Price, Technique, whole_step
from lowtide.undo import Applied
from lowtide.workload import Workload


class OptimizerInBackward(Technique):
    """Each parameter is stepped as soon as its gradient is complete.

    The parameters after a step are a plain step's, bit for bit. But no gradients are left to read, clip or accumulate
    before the step. The fidelity is therefore ``changed``: plans use it only on request.
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
        """A gradient dies when it is complete, instead of at the end."""
        graph = profile.graph
        gradients = [(graph.storages[storage], whole) for storage, whole in graph.gradient_ends.items()]
        removed = (Interval(g.bytes, whole + 1, g.death, "a gradient, freed") for g, whole in gradients)
        return Price(Fidelity.CHANGED, removed=tuple(removed))

    def apply(self, work: Workload, options: Sequence[Option]) -> Applied:
        """Put the step on the parameters; the optimizer stays the same object. Without one there is nothing to do."""
        whole_step(options)
        if work.optimizer is None:
            return Applied(work)
        return Applied(work, step_in_backward(work.optimizer))

    def check(self, option: Option) -> Check:
        """The parameters are a plain step's; no gradients are left to compare."""
        return Check(Fidelity.CHANGED, leaves_gradients=False)
