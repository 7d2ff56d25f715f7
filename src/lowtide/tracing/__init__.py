"""Tracing: from a step to a graph of ops and storages."""

from lowtide.tracing.graph import Graph, Op, Saved, Storage, TensorView
from lowtide.tracing.tracer import trace

__all__ = ["Graph", "Op", "Saved", "Storage", "TensorView", "trace"]
