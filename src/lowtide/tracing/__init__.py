"""Tracing: from a step to a graph of ops and storages."""

from lowtide.tracing.capture import trace
from lowtide.tracing.graph import Graph, Op, Saved, Storage, Value

__all__ = ["Graph", "Op", "Saved", "Storage", "Value", "trace"]
