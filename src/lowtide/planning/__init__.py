"""Planning: a step and a budget in, what to change and why out."""

from lowtide.planning.budget import Budget, plan, resolve_budget
from lowtide.planning.plan import Baseline, Choice, Plan
from lowtide.planning.prediction import apply_options, estimate_peak, predict

__all__ = [
    "Baseline",
    "Budget",
    "Choice",
    "Plan",
    "apply_options",
    "estimate_peak",
    "plan",
    "predict",
    "resolve_budget",
]
