"""Profiling: a step in, who holds the bytes and when out."""

from lowtide.profiling.profile import Comparison, Profile
from lowtide.profiling.profiler import profile
from lowtide.profiling.sweep import Sweep, SweepPoint, max_batch, sweep

__all__ = ["Comparison", "Profile", "Sweep", "SweepPoint", "max_batch", "profile", "sweep"]
