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


def matched(node: Any, pattern: Any, named: dict[str, Any], nodes: list[fx.Node]) -> bool:
    """Tell whether an argument matches a pattern: a tuple of an op and its arguments, a name, or the value itself.

    A name stands for one value wherever it stands, and ``named`` keeps it. ``nodes`` gets the ops of the tuples.
    """
    if isinstance(pattern, str):
        return named.setdefault(pattern, node) == node
    if not isinstance(pattern, tuple):
        return node == pattern
    target, *arguments = pattern
    if not isinstance(node, fx.Node) or node.target is not target or len(node.args) != len(arguments) or node.kwargs:
        return False
    nodes.append(node)
    return all(matched(each, part, named, nodes) for each, part in zip(node.args, arguments, strict=True))
