"""Batches of any structure: torch's pytrees, other mappings, and objects with tensors in their attributes.

Examples are a tokenizer's encoding and a dataclass. Rebuilt, they have the same type and hold the same other values.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from operator import is_not
from typing import Any

from torch import Tensor, nn

from lowtide.compat import pytree

Structure = pytree.TreeSpec
unflatten = pytree.tree_unflatten
_PLAIN = (Tensor, str, bytes, int, float, complex, type(None))
_DEPTH = 2  # objects within objects


def tensors(batch: Any) -> list[Tensor]:
    """The tensors of a batch.

    >>> import torch
    >>> from collections import UserDict
    >>> [t.shape for t in tensors((torch.zeros(2, 3), UserDict(y=torch.zeros(2))))]
    [torch.Size([2, 3]), torch.Size([2])]
    """
    return [leaf for leaf in flatten(batch)[0] if isinstance(leaf, Tensor)]


def map_tensors(function: Callable[[Tensor], Any], batch: Any) -> Any:
    """Apply a function to each tensor of a batch."""
    leaves, structure = flatten(batch)
    return unflatten([function(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves], structure)


def with_own_containers(batch: Any) -> Any:
    """Copy the containers, not the tensors: a loss may take its batch apart."""
    return map_tensors(lambda tensor: tensor, batch)


def flatten(batch: Any) -> tuple[list[Any], Structure]:
    """Return the leaves of a batch, and the structure for ``unflatten``."""
    return pytree.tree_flatten(_opened(batch, _DEPTH))


def flatten_with_path(batch: Any) -> tuple[list[tuple[tuple[Any, ...], Any]], Structure]:
    """Do as ``flatten``, with the keys that lead to each leaf."""
    return pytree.tree_flatten_with_path(_opened(batch, _DEPTH))


def _opened(batch: Any, depth: int) -> Any:
    """The batch, with what torch takes for leaves as nodes."""
    leaves, structure = pytree.tree_flatten(batch)
    opened = [_open(leaf, depth) for leaf in leaves]
    return unflatten(opened, structure) if any(map(is_not, opened, leaves)) else batch


def _open(leaf: Any, depth: int) -> Any:
    if isinstance(leaf, _PLAIN):
        return leaf
    if isinstance(leaf, Mapping):
        return _PytreeNode(leaf, dict(leaf), depth)
    if not depth or isinstance(leaf, (type, nn.Module)):
        return leaf
    if dataclasses.is_dataclass(leaf):
        attributes = {each.name: getattr(leaf, each.name, None) for each in dataclasses.fields(leaf)}
        attributes |= getattr(leaf, "__dict__", {})
    else:
        attributes = getattr(leaf, "__dict__", {})
    if not attributes:
        return leaf
    inside = pytree.tree_leaves(_opened(list(attributes.values()), depth - 1))
    return _PytreeNode(leaf, dict(attributes), depth - 1) if any(isinstance(each, Tensor) for each in inside) else leaf


class _PytreeNode:
    """A mapping or object as a node of a pytree."""

    def __init__(self, value: Any, parts: dict[Any, Any], depth: int) -> None:
        self.value, self.parts, self.depth = value, parts, depth

    def flatten(self) -> tuple[list[Any], _NodeStructure]:
        parts = [_opened(part, self.depth) for part in self.parts.values()]
        return parts, _NodeStructure(type(self.value), tuple(self.parts), self.value)

    def flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], _NodeStructure]:
        parts, kind = self.flatten()
        key = pytree.MappingKey if isinstance(self.value, Mapping) else pytree.GetAttrKey
        return [(key(name), part) for name, part in zip(kind.names, parts, strict=True)], kind


@dataclass(frozen=True)
class _NodeStructure:
    """The structure of a node. Two are equal by type and names alone."""

    type: type
    names: tuple[Any, ...]
    value: Any = field(compare=False, repr=False)

    def with_parts(self, parts: Sequence[Any]) -> Any:
        named = dict(zip(self.names, parts, strict=True))
        if isinstance(self.value, Mapping) and not isinstance(self.value, MutableMapping):
            return self.type(named)
        rebuilt: Any = copy.copy(self.value)
        if not isinstance(self.value, MutableMapping):
            for name, part in named.items():
                object.__setattr__(rebuilt, name, part)  # a frozen dataclass too
            return rebuilt
        if getattr(self.value, "__dict__", None) is self.value:  # its items are its attributes
            rebuilt.__dict__ = rebuilt
        elif not isinstance(self.value, UserDict):  # it must not share the dict of its items
            held = getattr(rebuilt, "__dict__", {})
            held.update({name: copy.copy(each) for name, each in held.items() if isinstance(each, MutableMapping)})
        for name, part in named.items():
            rebuilt[name] = part
        return rebuilt


pytree.register_pytree_node(
    _PytreeNode,
    _PytreeNode.flatten,
    lambda parts, kind: kind.with_parts(list(parts)),
    flatten_with_keys_fn=_PytreeNode.flatten_with_keys,
)
