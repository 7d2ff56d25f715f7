"""What goes with a larger batch, as a technique: rates scaled and warmed up, updates bounded as LARS and LAMB do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lowtide.errors import PlanError
from lowtide.optim.large_batch import RULES, scale_rates
from lowtide.profiling.profile import Profile
from lowtide.techniques.technique import Check, Fidelity, Kind, Option, Price
from lowtide.undo import Applied
from lowtide.workload import Workload

_FACTORS = (4, 16)
_WARMUP_STEPS = 500


class LargeBatch:
    """Rates for a batch ``factor`` times as large as the one that they were chosen for.

    Knobs: ``factor``, ``warmup_steps``, ``rule`` ("linear" or "sqrt") and ``bound`` (0 for none; above it SGD becomes
    LARS, Adam LAMB). It takes no memory away: it goes with a larger batch, which spends what others saved. So no plan
    chooses it; it is named: ``Option("large_batch", ("",), (("factor", 16), ("warmup_steps", 500)))``.
    """

    name = "large_batch"
    kind: Kind = "step"
    needs = "an optimizer"
    conflicts: Mapping[str, str] = {
        "optimizer_in_backward": "steps in backward are not the optimizer's, whose rate it sets"
    }

    def options(self, profile: Profile) -> list[Option]:
        """A batch 4 and 16 times as large, by the rule that is customary for the optimizer."""
        graph = profile.graph
        if "optimizer" not in graph.phase_starts():
            return []
        rule = "sqrt" if any(storage.label.endswith(".exp_avg") for storage in graph.storages) else "linear"
        knobs = (("warmup_steps", _WARMUP_STEPS), ("rule", rule))
        return [Option(self.name, ("",), (("factor", factor), *knobs)) for factor in _FACTORS]

    def price(self, option: Option, profile: Profile) -> Price:
        """No bytes and no seconds, either way."""
        return Price(Fidelity.CHANGED)

    def apply(self, work: Workload, options: Sequence[Option]) -> Applied:
        """Put it around the optimizer's step. Without an optimizer there is nothing to do."""
        option = options[0]
        if option.site != ("",) or len(options) != 1:
            raise PlanError("Rates are scaled once, for the whole step", where=str(option))
        factor, bound = _number(option, "factor", 1), _number(option, "bound", 0)
        warmup_steps, rule = option.knob("warmup_steps", 0), option.knob("rule", "linear")
        if not isinstance(warmup_steps, int) or rule not in RULES:
            raise PlanError(
                f"warmup_steps={warmup_steps!r}, rule={rule!r} cannot be",
                where=str(option),
                hint=f"Steps are a whole number, and the rule is one of: {', '.join(RULES)}.",
            )
        if work.optimizer is None:
            return Applied(work)
        chosen = RULES[RULES.index(rule)]
        undo = scale_rates(work.optimizer, factor, warmup_steps=warmup_steps, rule=chosen, bound=bound)
        return Applied(work, undo)

    def check(self, option: Option) -> Check:
        """The gradients are the plain step's; the parameters go on at another rate."""
        return Check(Fidelity.CHANGED)


def _number(option: Option, name: str, default: float) -> float:
    value = option.knob(name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise PlanError(f"{name}={value!r} is not a number", where=str(option))
    return value
