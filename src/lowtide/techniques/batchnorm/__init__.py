"""Batch norm and its activation as one layer: where a model has them, and the change in place."""

from lowtide.techniques.batchnorm.convert import Change, Conversion, convert
from lowtide.techniques.batchnorm.find import Left

__all__ = ["Change", "Conversion", "Left", "convert"]
