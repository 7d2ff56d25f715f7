"""Schedules for a chain of stages: what to keep and what to run again, so that it fits and is fast."""

from lowtide.planning.chains.chain import Chain
from lowtide.planning.chains.explain import StageChoice, explain
from lowtide.planning.chains.optimal import Optimal, optimal
from lowtide.planning.chains.schedule import Kind, Operation, Schedule, Simulation, simulate
from lowtide.planning.chains.simple import keep_all, recursive, sqrt

__all__ = [
    "Chain",
    "Kind",
    "Operation",
    "Optimal",
    "Schedule",
    "Simulation",
    "StageChoice",
    "explain",
    "keep_all",
    "optimal",
    "recursive",
    "simulate",
    "sqrt",
]
