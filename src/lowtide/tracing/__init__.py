"""Tracing: a step in, a graph of ops and storages out."""

from lowtide.tracing.capture import trace
from lowtide.tracing.graph import Graph, Op, Saved, Storage, Value

__all__ = ["Graph", "Op", "Saved", "Storage", "Value", "trace"]
