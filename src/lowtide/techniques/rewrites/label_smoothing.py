"""Label smoothing as ``F.cross_entropy`` computes it: one part of the loss reads one class of each row, one reads all.

(1 - ε)·nll_loss - ε/classes·Σ log_softmax      over the rows that count; divided by their number in a mean
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lowtide.techniques.rewrites.nodes import matched

_aten: Any = torch.ops.aten


@dataclass(frozen=True)
class Smoothing:
    """Both parts of one loss: their sum, and the gradient that comes to it."""

    epsilon: float
    loss: fx.Node
    tangent: fx.Node
    nodes: tuple[fx.Node, ...]


def smoothing_of(softmax: fx.Node, forward: fx.Node, backward: fx.Node, slope: Any) -> Smoothing | None:
    """Both parts around an ``nll_loss``, where ``slope`` is the gradient of the log softmax; None for anything else."""
    arguments: Any = forward.args
    _, target, _, reduction, ignore_index = arguments
    rows, classes = softmax.meta["val"].shape
    ignored = (_aten.eq.Scalar, target, ignore_index)

    def averaged(total: Any) -> Any:
        is_mean = reduction == 1
        return (
            (_aten.div.Tensor, total, (_aten.sum.default, (_aten.bitwise_not.default, ignored))) if is_mean else total
        )

    of_row = (_aten.neg.default, (_aten.sum.dim_IntList, softmax, [1]))
    even = averaged((_aten.sum.default, (_aten.masked_fill.Scalar, of_row, ignored, 0)))
    picked = (_aten.mul.Scalar, (operator.getitem, forward, 0), "rest")
    of_even = (_aten.expand.default, averaged((_aten.mul.Scalar, "tangent", "share")), [rows])
    to_row = (_aten.unsqueeze.default, (_aten.neg.default, (_aten.masked_fill.Scalar, of_even, ignored, 0)), 1)

    named: dict[str, Any] = {}
    nodes: list[fx.Node] = []
    loss = _second_reader(forward)
    parts = (
        (loss, (_aten.add.Tensor, picked, (_aten.mul.Scalar, even, "share"))),
        (slope, (_aten.add.Tensor, (_aten.expand.default, to_row, [rows, classes]), backward)),
        (backward.args[0], (_aten.mul.Scalar, "tangent", "rest")),
    )
    if loss is None or not all(matched(node, pattern, named, nodes) for node, pattern in parts):
        return None
    epsilon = named["share"] * classes
    if not math.isclose(named["rest"], 1 - epsilon, abs_tol=1e-9):
        return None
    return Smoothing(epsilon, loss, named["tangent"], tuple(nodes))


def _second_reader(forward: fx.Node) -> fx.Node | None:
    """The op that reads the scaled loss of the picked classes."""
    for one in forward.users:
        if one.args[1] == 0 and len(one.users) == 1 and len((scaled := next(iter(one.users))).users) == 1:
            return next(iter(scaled.users))
    return None
