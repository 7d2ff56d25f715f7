"""Trees are taken apart and put together."""

from __future__ import annotations

from collections import UserList
from typing import Any

from lowtide.compat import pytree

TREE: Any = {"a": [1, (2, "x")], "b": 3}


def test_a_tree_is_its_leaves_and_its_structure() -> None:
    leaves, structure = pytree.tree_flatten(TREE)
    assert leaves == pytree.tree_leaves(TREE) == [1, 2, "x", 3]
    assert isinstance(structure, pytree.TreeSpec)
    assert pytree.tree_unflatten(leaves, structure) == TREE


def test_leaves_are_mapped() -> None:
    assert pytree.tree_map(str, TREE) == {"a": ["1", ("2", "x")], "b": "3"}
    assert pytree.tree_map_only(int, lambda number: -number, TREE) == {"a": [-1, (-2, "x")], "b": -3}


def test_paths_are_written_as_python_writes_them() -> None:
    paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(TREE)[0]]
    assert paths == ["['a'][0]", "['a'][1][0]", "['a'][1][1]", "['b']"]
    assert pytree.keystr((pytree.MappingKey("a"), pytree.GetAttrKey("b"))) == "['a'].b"


def test_classes_are_registered_as_nodes() -> None:
    class Pair(UserList[Any]):
        pass

    assert len(pytree.tree_leaves(Pair([1, 2]))) == 1
    pytree.register_pytree_node(Pair, lambda pair: (list(pair), None), lambda leaves, _: Pair(leaves))
    assert pytree.tree_leaves(Pair([1, 2])) == [1, 2]
