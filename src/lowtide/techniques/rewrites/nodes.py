"""Nodes of a captured graph, as rewrites read and insert them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

_aten: Any = torch.ops.aten
ALIASES = (_aten.detach.default, _aten.alias.default)


def called(graph: fx.Graph, target: Any, *args: Any, like: fx.Node | None = None, **kwargs: Any) -> fx.Node:
    """Insert a call, with the fake result that it has, as a part of the module of ``like``.

    The caller enters the fake mode.
    """
    node = graph.call_function(target, args, kwargs)
    values = fx.map_arg((args, kwargs), lambda value: value.meta["val"])
    node.meta = {**(like.meta if like is not None else {}), "val": target(*values[0], **values[1])}
    return node


def behind(node: Any, targets: tuple[Any, ...] = ALIASES) -> fx.Node:
    """The node behind aliases, or behind other ops with one input."""
    while node.target in targets:
        node = node.args[0]
    return node


def readers(node: fx.Node, targets: tuple[Any, ...] = ALIASES) -> Iterator[fx.Node]:
    """Nodes that read a result, directly or through aliases, which are among them."""
    for user in node.users:
        yield user
        if user.target in targets:
            yield from readers(user, targets)
