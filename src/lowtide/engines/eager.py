"""The ``eager`` engine: the user's own modules, changed by options of techniques."""

from __future__ import annotations

from lowtide.planning.plan import Changes, Plan
from lowtide.planning.prediction import apply_options, predict
from lowtide.profiling import Profile
from lowtide.undo import Applied
from lowtide.workload import Workload


class EagerEngine:
    """Runs the model's own code; works where capture does not."""

    name = "eager"
    takes_options = True
    captures = False

    def candidates(self, work: Workload, baseline: Profile) -> None:
        """Offer none beside the options of techniques."""

    def apply(self, work: Workload, plan: Plan) -> Applied:
        """Apply the plan's options to the model."""
        return apply_options(work, plan.options)

    def predict(self, work: Workload, changes: Changes, baseline: Profile, *, only_peaks: bool = False) -> Profile:
        """Trace the planned step on fake tensors."""
        return predict(work, changes.options, baseline, only_peaks=only_peaks)
