"""Techniques: one file each, one shape for all. ``techniques()`` lists them; each can be used on its own."""

from lowtide.techniques.recompute import recompute
from lowtide.techniques.registry import register, techniques
from lowtide.techniques.replaced_forward import Forward, replace_forward
from lowtide.techniques.technique import Check, Config, Fidelity, Interval, Option, Price, Technique
from lowtide.undo import Applied, Undo

__all__ = [
    "Applied",
    "Check",
    "Config",
    "Fidelity",
    "Forward",
    "Interval",
    "Option",
    "Price",
    "Technique",
    "Undo",
    "recompute",
    "register",
    "replace_forward",
    "techniques",
]
