"""Activations that are kept for backward in few bits."""

from lowtide.techniques.compress.allocation import LayerCosts, allocate_bits, measure_layers
from lowtide.techniques.compress.technique import Compress

__all__ = ["Compress", "LayerCosts", "allocate_bits", "measure_layers"]
