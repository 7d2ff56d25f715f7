"""Engines: a plan in, the step that runs it out, and the proof that it does what was said."""

from lowtide.engines.fit import fit
from lowtide.engines.step import Measured, Step, apply
from lowtide.engines.tune import plan
from lowtide.engines.verify import Agreement, Verification, verify

__all__ = ["Agreement", "Measured", "Step", "Verification", "apply", "fit", "plan", "verify"]
