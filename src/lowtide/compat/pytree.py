"""Structures of lists, tuples and dictionaries, as torch takes them apart."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from lowtide.compat.versions import TRIED

if TYPE_CHECKING:
    from torch.utils._pytree import TreeSpec
else:
    TreeSpec = TRIED.find("torch.utils._pytree:TreeSpec")
    """The structure of a tree, without its leaves."""

MappingKey: Any = TRIED.find("torch.utils._pytree:MappingKey")
"""A step of a path through a mapping."""

GetAttrKey: Any = TRIED.find("torch.utils._pytree:GetAttrKey")
"""A step of a path through an object's attributes."""

keystr: Callable[[tuple[Any, ...]], str] = TRIED.find("torch.utils._pytree:keystr")
"""Write a path as Python would."""

register_pytree_node: Callable[..., None] = TRIED.find("torch.utils._pytree:register_pytree_node")
"""Have trees take the instances of a class apart."""

tree_flatten: Callable[..., tuple[list[Any], TreeSpec]] = TRIED.find("torch.utils._pytree:tree_flatten")
"""Return the leaves of a tree, and its structure."""

tree_flatten_with_path: Callable[..., tuple[list[tuple[tuple[Any, ...], Any]], TreeSpec]] = TRIED.find(
    "torch.utils._pytree:tree_flatten_with_path"
)
"""Return the leaves of a tree, each with the path to it, and its structure."""

tree_leaves: Callable[..., list[Any]] = TRIED.find("torch.utils._pytree:tree_leaves")
"""Return the leaves of a tree."""

tree_map: Callable[..., Any] = TRIED.find("torch.utils._pytree:tree_map")
"""Return a tree of the same structure, with a function's results as leaves."""

tree_map_only: Callable[..., Any] = TRIED.find("torch.utils._pytree:tree_map_only")
"""Return the same, where only the leaves of one type are replaced."""

tree_unflatten: Callable[[Iterable[Any], TreeSpec], Any] = TRIED.find("torch.utils._pytree:tree_unflatten")
"""Return the tree of some leaves and a structure."""
