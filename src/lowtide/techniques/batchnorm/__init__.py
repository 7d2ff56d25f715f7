"""Batch norm and its activation as one layer: where a model has them, and the change in place."""

from lowtide.techniques.batchnorm.convert import Change, Conversion, convert
from lowtide.techniques.batchnorm.find import Left
from lowtide.techniques.batchnorm.memory import Memory

__all__ = ["Change", "Conversion", "Left", "Memory", "convert"]
