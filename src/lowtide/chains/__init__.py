"""Schedules for a chain of stages: which values to keep, and which to recompute, within a budget in bytes."""

from lowtide.chains.chain import Chain
from lowtide.chains.explain import StageChoice, explain
from lowtide.chains.nested import Tree, nested
from lowtide.chains.optimal import OptimalSchedules, optimal
from lowtide.chains.schedule import Action, Operation, Schedule, ScheduleSimulation, simulate
from lowtide.chains.simple import keep_all, recursive, sqrt

__all__ = [
    "Action",
    "Chain",
    "Operation",
    "OptimalSchedules",
    "Schedule",
    "ScheduleSimulation",
    "StageChoice",
    "Tree",
    "explain",
    "keep_all",
    "nested",
    "optimal",
    "recursive",
    "simulate",
    "sqrt",
]
