"""A part of a step in a few words, for people."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from lowtide.tracing.capture.joint import module_of


def outline(nodes: Sequence[fx.Node]) -> str:
    """Ops by their modules and the heavy ones among them."""
    ops = [node for node in nodes if "." in str(node.target)]
    heavy = _heavy_ops([str(node.target).split(".")[1] for node in ops])
    return ": ".join(filter(None, (_span(list(map(module_of, ops))), heavy)))


def _span(modules: list[str]) -> str:
    """The first and the last of the modules that ran.

    >>> _span(["blocks.0.wide", "blocks.0.wide"]), _span(["blocks.0.out", "blocks.0", "blocks.1.norm"])
    ('blocks.0.wide', 'blocks.0.out … blocks.1.norm')
    """
    named = list(filter(None, modules))
    return " … ".join(dict.fromkeys((named[0], named[-1]))) if named else ""


def _heavy_ops(ops: list[str]) -> str:
    """The heavy ops of a stage, or the first ones."""
    heavy = [op for op in ops if op.endswith(("mm", "convolution")) or "attention" in op]
    shown = list(dict.fromkeys(heavy or ops))
    return ", ".join(shown[:2]) + (", …" if len(ops) > 2 else "")
