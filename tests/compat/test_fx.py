"""Code of graphs takes its arguments in a list, and calls ops without their wrappers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from lowtide.compat.fx import bound_forward, box_arguments, line_of

aten: Any = torch.ops.aten


def graph_of_two() -> fx.Graph:
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    graph.output(graph.call_function(aten.mul.Tensor, (graph.call_function(aten.exp.default, (x,)), y)))
    return graph


def test_boxed_code_takes_a_list_and_empties_it() -> None:
    module = fx.GraphModule({}, graph_of_two())
    box_arguments(module.graph)
    module.recompile()
    args = [torch.ones(2), torch.ones(2)]
    assert torch.equal(module.forward(args), torch.ones(2).exp())
    assert args == []


def test_bound_code_calls_functions_in_cpp() -> None:
    forward = bound_forward(graph_of_two())
    x, y = torch.rand(2), torch.rand(2)
    assert torch.equal(forward(None, x, y), x.exp() * y)
    called = {name: forward.__globals__[name] for name in forward.__code__.co_names if "exp" in name or "mul" in name}
    assert len(called) == 2
    assert not {type(each) for each in called.values()} & {type(aten.exp.default), Tensor}


def test_an_op_comes_from_the_innermost_line() -> None:
    node = graph_of_two().find_nodes(op="call_function", target=aten.exp.default)[0]
    assert line_of(node) == ("", 0)
    node.meta["stack_trace"] = "".join(
        f'  File "{name}.py", line {line}, in f\n    y = x\n' for name, line in (("a", 1), ("b", 2))
    )
    assert line_of(node) == ("b.py", 2)
