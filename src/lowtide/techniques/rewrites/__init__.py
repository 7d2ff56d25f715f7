"""Rewrites of a captured graph: a pattern of ops, replaced by another with the same mathematics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import fx

from lowtide.techniques.rewrites.batchnorm import split_batch_norms
from lowtide.techniques.rewrites.channels_last import lay_channels_last
from lowtide.techniques.rewrites.chunked_loss import chunk_losses
from lowtide.techniques.rewrites.seeded_dropout import seed_dropouts
from lowtide.tracing.capture.joint import Joint


class Rewrite(NamedTuple):
    """A pattern that is replaced wherever it stands in a captured graph."""

    name: str
    apply: Callable[[fx.Graph], int]  # to the graph; how many places it changed


CHANNELS_LAST = Rewrite("channels_last", lay_channels_last)
"""For compiled code: regions end in the layout that the next one reads."""

REWRITES = (Rewrite("chunked_loss", chunk_losses), Rewrite("batchnorm", split_batch_norms))
"""Rewrites that save bytes op by op too. They draw what the plain step draws."""

SEEDED_DROPOUT = Rewrite("seeded_dropout", seed_dropouts)
"""For compiled code. It draws other masks than the plain step."""


def rewritten(joint: Joint, rewrites: Sequence[Rewrite]) -> Joint:
    """A copy of the joint graph with these patterns replaced. It says how many places each changed."""
    module = joint.as_captured()
    places = {name: apply(module.graph) for name, apply in rewrites}
    module.recompile()
    form = joint.rewritten(module)
    form.rewrites = {name: count for name, count in places.items() if count}
    return form
