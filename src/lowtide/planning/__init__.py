"""Planning: from a step and a budget to a plan with its reasons."""

from lowtide.planning.budget import Budget, plans, resolve_budget
from lowtide.planning.plan import Baseline, Choice, Plan
from lowtide.planning.prediction import Prediction, apply_options, estimate_peak, predict, predict_plan

__all__ = [
    "Baseline",
    "Budget",
    "Choice",
    "Plan",
    "Prediction",
    "apply_options",
    "estimate_peak",
    "plans",
    "predict",
    "predict_plan",
    "resolve_budget",
]
