"""Nodes that rewrites read and insert."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from lowtide.techniques.rewrites.nodes import behind, called, matched, readers

aten: Any = torch.ops.aten


def traced() -> Any:
    def function(x: Tensor) -> Tensor:
        y = aten.exp(x)
        return aten.sin(aten.alias(aten.detach(y))) + aten.cos(y)

    return make_fx(function, tracing_mode="fake")(torch.ones(3)).graph


def node(graph: Any, target: Any) -> Any:
    (found,) = graph.find_nodes(op="call_function", target=target)
    return found


def test_readers_are_found_through_aliases() -> None:
    graph = traced()
    found = {each.target for each in readers(node(graph, aten.exp.default))}
    assert found == {aten.detach.default, aten.alias.default, aten.sin.default, aten.cos.default}


def test_the_node_behind_aliases_is_found() -> None:
    graph = traced()
    assert behind(node(graph, aten.sin.default).args[0]) is node(graph, aten.exp.default)
    assert behind(node(graph, aten.cos.default)) is node(graph, aten.cos.default)


def test_a_call_has_its_fake_result_and_the_module_of_another() -> None:
    graph = traced()
    source = node(graph, aten.exp.default)
    source.meta["nn_module_stack"] = {"x": ("L['work'].model.layer", None)}
    with graph.inserting_after(source), source.meta["val"].fake_mode:
        made = called(graph, aten.cat.default, [source, source], like=source)
    assert made.meta["val"].shape == (6,)
    assert made.meta["nn_module_stack"] is source.meta["nn_module_stack"]


def test_a_pattern_matches_ops_and_their_arguments() -> None:
    graph = traced()
    total = node(graph, aten.add.Tensor)
    found: dict[str, Any] = {}
    nodes: list[Any] = []
    source = (aten.exp.default, "x")
    pattern = (aten.add.Tensor, (aten.sin.default, (aten.alias.default, "kept")), (aten.cos.default, source))
    assert matched(total, pattern, found, nodes)
    assert found == {"x": node(graph, aten.exp.default).args[0], "kept": node(graph, aten.detach.default)}
    assert {each.target for each in nodes} == {aten.add.Tensor, aten.sin.default, aten.alias.default, aten.cos.default,
                                               aten.exp.default}  # fmt: skip


def test_a_name_in_a_pattern_stands_for_one_value() -> None:
    graph = traced()
    total = node(graph, aten.add.Tensor)
    assert not matched(total, (aten.add.Tensor, "x", "x"), {}, [])
    assert matched(total, (aten.add.Tensor, "x", "y"), {}, [])
    assert not matched(total, (aten.add.Tensor, "x"), {}, [])
    assert not matched(total, (aten.add.Tensor, "x", (aten.sin.default, "y")), {}, [])
