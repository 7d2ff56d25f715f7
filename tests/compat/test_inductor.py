"""One graph in, compiled code out: it keeps strides, empties its list, and takes given ops apart."""

from __future__ import annotations

import operator
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode

from lowtide.compat.fake import captured_fake_mode
from lowtide.compat.inductor import compile_graph, compiled_together, decompose

aten: Any = torch.ops.aten


def fakes(*values: Tensor) -> list[Any]:
    mode = FakeTensorMode()
    return [mode.from_tensor(value) for value in values]


def graph_of(*ops: tuple[Any, Sequence[Any]], inputs: int, outputs: Sequence[int]) -> fx.GraphModule:
    """Ops one after another; numbers in lists are places of inputs and earlier results."""
    graph = fx.Graph()
    nodes = [graph.placeholder(f"x{place}") for place in range(inputs)]
    for target, arguments in ops:
        nodes.append(graph.call_function(target, tuple(nodes[a[0]] if isinstance(a, list) else a for a in arguments)))
    graph.output(tuple(nodes[place] for place in outputs))
    return fx.GraphModule({}, graph)


def test_compiled_code_keeps_strides_and_empties_its_list() -> None:
    x, y = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), torch.randn(3, 7).t()
    ops = [(aten.mul.Tensor, ([0], 2.0)), (aten.exp.default, ([1],)), (aten.add.Tensor, ([3], 1.0))]
    given = fakes(x, y)
    code = compile_graph(decompose(graph_of(*ops, inputs=2, outputs=(2, 4)), given, {}), given)
    arguments = [x, y]
    double, more = code(arguments)
    assert arguments == []
    torch.testing.assert_close((double, more), (x * 2, y.exp() + 1))
    assert (double.stride(), more.stride()) == (x.stride(), y.stride())


def test_graphs_that_are_compiled_together_wait_for_their_kernels_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.async_compile import AsyncCompile

    waited: list[int] = []
    plain = AsyncCompile.wait

    def noting(compiling: AsyncCompile, names: dict[str, Any]) -> None:
        waited.append(threading.get_ident())
        plain(compiling, names)

    monkeypatch.setattr(AsyncCompile, "wait", noting)
    x = torch.randn(5)
    given = fakes(x)
    codes: list[Any] = []

    def compiled(factor: float) -> Any:
        module = graph_of((aten.mul.Tensor, ([0], factor)), (aten.exp.default, ([1],)), inputs=1, outputs=(2,))
        return compile_graph(decompose(module, given, {}), given)

    with compiled_together():
        codes += [compiled(factor) for factor in (1.7310, 2.3110, 1.7310)]
        assert not waited
        other = threading.Thread(target=lambda: codes.append(compiled(3.1110)))
        other.start()
        other.join()
        assert len(waited) == 1
    assert len(waited) == 4
    assert AsyncCompile.wait is noting
    for code, factor in zip(codes, (1.7310, 2.3110, 1.7310, 3.1110), strict=True):
        torch.testing.assert_close(code([x])[0], (x * factor).exp())


def test_blocks_of_two_threads_follow_each_other_and_leave_inductor_as_it_was() -> None:
    from torch._inductor.async_compile import AsyncCompile

    plain, inside, done = AsyncCompile.wait, threading.Event(), threading.Event()

    def other() -> None:
        with compiled_together():
            inside.set()
            done.wait(60)

    with compiled_together():
        thread = threading.Thread(target=other)
        thread.start()
        assert not inside.wait(0.1)
        with compiled_together():  # within one thread they nest
            pass
        assert AsyncCompile.wait is not plain
    assert inside.wait(60)
    done.set()
    thread.join()
    assert AsyncCompile.wait is plain


def test_ops_are_taken_apart_by_inductors_table_and_the_given_one() -> None:
    table = {aten.relu.default: lambda x: aten.maximum.default(x, aten.zeros_like.default(x))}
    module = graph_of((aten.relu.default, ([0],)), (aten.silu.default, ([1],)), inputs=1, outputs=(2,))
    x = torch.randn(5)
    traced = decompose(module, fakes(x), table)
    targets = {node.target for node in traced.graph.nodes if node.op == "call_function"}
    assert aten.maximum.default in targets
    assert not targets & {aten.relu.default, aten.silu.default}
    torch.testing.assert_close(traced(x), module(x))
    assert aten.maximum.default not in {node.target for node in decompose(module, fakes(x), {}).graph.nodes}


def test_traced_graphs_hold_fake_tensors_of_the_given_layout() -> None:
    x = torch.randn(3, 7).t()
    (given,) = fakes(x)
    traced = decompose(graph_of((aten.exp.default, ([0],)), inputs=1, outputs=(1,)), [given], {})
    (node,) = traced.graph.find_nodes(op="call_function", target=aten.exp.default)
    assert node.meta["val"].fake_mode is given.fake_mode
    assert node.meta["val"].stride() == x.stride()


def test_results_have_the_strides_of_the_graph_where_a_decomposition_gives_others() -> None:
    """Torch's decomposition of ``cat`` with an empty tensor keeps the strides of the other one."""
    empty, x = torch.empty(0), torch.randn(2, 5, 3).transpose(1, 2)
    given = fakes(empty, x)
    graph = fx.Graph()
    joined = graph.call_function(aten.cat.default, ([graph.placeholder("empty"), graph.placeholder("x")],))
    joined.meta["val"] = given[1].fake_mode.from_tensor(torch.cat([empty, x]))
    graph.output((joined,))
    traced = decompose(fx.GraphModule({}, graph), given, {})
    assert {node.target for node in traced.graph.nodes}.isdisjoint({aten.cat.default})
    (result,) = traced(empty, x)
    assert result.is_contiguous()
    assert torch.equal(result, x)


def test_results_have_the_dtype_of_the_graph_where_a_decomposition_gives_another() -> None:
    """Torch's decomposition of a group norm rounds statistics to the input's type; a CPU's have the weights'."""
    x, weight = torch.randn(2, 4, 3, dtype=torch.bfloat16), torch.ones(4)
    expected = aten.native_group_norm.default(x, weight, weight, 2, 4, 3, 2, 1e-5)
    given = fakes(x, weight)
    operation = (aten.native_group_norm.default, ([0], [1], [1], 2, 4, 3, 2, 1e-5))
    items = [(operator.getitem, ([2], place)) for place in range(3)]
    module = graph_of(operation, *items, inputs=2, outputs=(3, 4, 5))
    for node, value in zip([*module.graph.nodes][3:], expected, strict=False):
        node.meta["val"] = given[0].fake_mode.from_tensor(value)
    found = decompose(module, given, {})(x, weight)
    assert [each.dtype for each in found] == [each.dtype for each in expected]
    torch.testing.assert_close(found, expected, rtol=1.6e-2, atol=1e-2)  # of bfloat16, in which they were rounded


def test_code_is_built_once_and_read_from_disk_from_then_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a later process takes a fraction of the time: nothing that stays in memory is part of the key."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    x = torch.randn(11, 13)
    found: list[list[int]] = []
    for _ in range(2):
        torch._dynamo.utils.counters.clear()
        given = [captured_fake_mode().from_tensor(x)]
        module = graph_of((aten.exp.default, ([0],)), inputs=1, outputs=(1,))
        code = compile_graph(decompose(module, given, {}), given)
        torch.testing.assert_close(code([x])[0], x.exp())
        counts = torch._dynamo.utils.counters["inductor"]
        found.append([counts[f"fxgraph_cache_{what}"] for what in ("miss", "hit", "bypass")])
    assert found == [[1, 0, 0], [0, 1, 0]]
