"""Structures of lists, tuples and dictionaries, as torch takes them apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils import _pytree

TreeSpec = _pytree.TreeSpec
"""The structure of a tree, without its leaves."""

MappingKey = _pytree.MappingKey
"""A step of a path through a mapping."""

GetAttrKey = _pytree.GetAttrKey
"""A step of a path through an object's attributes."""

keystr: Callable[[tuple[Any, ...]], str] = _pytree.keystr
"""Write a path as Python would."""

register_pytree_node = _pytree.register_pytree_node
"""Have trees take the instances of a class apart."""

tree_flatten = _pytree.tree_flatten
"""Return the leaves of a tree, and its structure."""

tree_flatten_with_path = _pytree.tree_flatten_with_path
"""Return the leaves of a tree, each with the path to it, and its structure."""

tree_leaves = _pytree.tree_leaves
"""Return the leaves of a tree."""

tree_map = _pytree.tree_map
"""Return a tree of the same structure, with a function's results as leaves."""

tree_map_only: Callable[..., Any] = _pytree.tree_map_only
"""Return the same, where only the leaves of one type are replaced."""

tree_unflatten = _pytree.tree_unflatten
"""Return the tree of some leaves and a structure."""
