"""Dropout from explicit seeds: a step holds two integers for each mask, and computes it wherever it reads it."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from lowtide.kernels.dropout_mask import MOST_ELEMENTS

_aten: Any = torch.ops.aten
_MASK: Any = torch.ops.lowtide.dropout_mask.default
_WORDS = 4  # of 32 bits for each seed, of which two are used: compiled code wants its inputs aligned to 16 bytes


def seed_dropouts(graph: fx.Graph) -> int:
    """Draw dropout masks from seeds, all in one draw; return how many. The plain step draws other masks."""
    dropouts = [node for node in graph.find_nodes(op="call_function", target=_aten.native_dropout.default)
                if node.args[2] and 0 < node.args[1] < 1 and _value(node.args[0]).numel() <= MOST_ELEMENTS]  # fmt: skip
    if not dropouts:
        return 0
    first = _value(dropouts[0].args[0])
    *_, last_input = graph.find_nodes(op="placeholder")
    with graph.inserting_after(last_input), first.fake_mode:
        seeds = graph.call_function(
            _aten.randint.low,
            (-(2**31), 2**31 - 1, [len(dropouts), _WORDS]),
            {"dtype": torch.int32, "device": first.device, "pin_memory": False},
        )
        seeds.meta["val"] = torch.empty(len(dropouts), _WORDS, dtype=torch.int32, device=first.device)
    with graph.inserting_after(seeds), first.fake_mode:
        rows = graph.call_function(_aten.unbind.int, (seeds,))
        rows.meta["val"] = list(seeds.meta["val"].unbind())
    after = rows
    for place, node in enumerate(dropouts):
        with graph.inserting_after(after):
            after = graph.call_function(operator.getitem, (rows, place))
            after.meta["val"] = rows.meta["val"][place]
        _replace(graph, node, after)
    return len(dropouts)


def _replace(graph: fx.Graph, node: fx.Node, seed: fx.Node) -> None:
    """Replace one dropout by its mask, and by the op that applies one."""
    x, p = node.args[0], node.args[1]
    value = _value(x)
    meta = {name: each for name, each in node.meta.items() if name != "val"}
    size = list(value.shape)
    with graph.inserting_before(node), value.fake_mode:
        mask = graph.call_function(_MASK, (seed, size, p))
        mask.meta = {**meta, "val": torch.empty(size, dtype=torch.bool, device=value.device)}
        scale = 1 / (1 - p)  # pyright: ignore[reportOperatorIssue]
        result = graph.call_function(_aten.native_dropout_backward.default, (x, mask, scale))
        result.meta = {**meta, "val": torch.empty_like(value)}
    for item in [user for user in node.users if user.target is operator.getitem]:
        item.replace_all_uses_with(result if item.args[1] == 0 else mask)
        graph.erase_node(item)
    graph.erase_node(node)


def _value(node: Any) -> Any:
    return node.meta["val"]
