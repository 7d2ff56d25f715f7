"""Engines: from a plan to the step that runs it, and its verification."""

from lowtide.engines.fit import fit
from lowtide.engines.step import Measured, Step, apply
from lowtide.engines.tune import plan
from lowtide.engines.verify import Agreement, Verification, verify

__all__ = ["Agreement", "Measured", "Step", "Verification", "apply", "fit", "plan", "verify"]
