"""Dynamo, AOTAutograd and Inductor do what lowtide asks of them."""

from __future__ import annotations

import contextlib
import gc
import logging
import subprocess
import sys
import weakref
from collections.abc import Generator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn

from lowtide.compat import dynamo


@pytest.fixture(autouse=True)
def _fresh() -> Generator[None]:
    yield
    torch._dynamo.reset()


def test_importing_it_imports_no_compiler() -> None:
    code = "import sys, lowtide.compat.dynamo; print({'torch._dynamo', 'torch._inductor'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"


@pytest.mark.parametrize("is_imported", [True, False])
def test_a_result_is_constant_to_dynamo_whether_dynamo_is_imported_or_not(
    is_imported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = torch.compiler.assume_constant_result(lambda: 0)
    if not is_imported:
        monkeypatch.delitem(sys.modules, "torch._dynamo")
    marked = dynamo.assume_constant_result(lambda: 0)
    assert vars(marked) == vars(expected)


def test_a_function_without_dynamo_breaks_the_graph() -> None:
    seen: list[bool] = []

    @dynamo.disable_dynamo
    def inner(x: Tensor) -> Tensor:
        seen.append(torch.compiler.is_compiling())
        return x

    torch.compile(lambda x: inner(x * 2) + 1, backend="eager")(torch.ones(2))
    assert seen == [False]


def test_skipped_code_is_left_to_python() -> None:
    graphs: list[Any] = []

    def backend(graph: fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph

    def double(x: Tensor) -> Tensor:
        return x * 2

    dynamo.skip_code(double.__code__)
    torch.compile(double, backend=backend)(torch.ones(2))
    assert not graphs


def capture(loss: Any, *inputs: Any) -> dict[str, Any]:
    """Compile a function by AOTAutograd, and note what the names of this module show on the way."""
    notes: dict[str, Any] = {"graphs": []}

    def partition(joint: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **_: Any) -> Any:
        notes["joint"] = joint
        return dynamo.default_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs)

    def compiler(graph: fx.GraphModule, _: Any) -> Any:
        notes["graphs"].append(graph)
        notes["metadata"] = dynamo.traced_metadata()
        return dynamo.make_boxed(graph)

    def backend(graph: fx.GraphModule, inputs: Any) -> Any:
        notes["sources"] = [dynamo.source_of(node) for node in graph.graph.find_nodes(op="placeholder")]
        notes["fakes"] = list(dynamo.traced_inputs())
        notes["own gradients"] = dynamo.has_own_gradients(graph)
        return dynamo.aot_autograd(fw_compiler=compiler, bw_compiler=compiler, partition_fn=partition)(graph, inputs)

    torch.compile(loss, backend=backend)(*inputs).backward()
    return notes


def test_a_loss_is_captured_with_its_backward_pass() -> None:
    x, y = torch.rand(3, requires_grad=True), torch.rand(3, requires_grad=True)
    notes = capture(lambda x, y: (x.sin() * y).sum(), x, y)
    assert x.grad is not None
    torch.testing.assert_close(x.grad, x.detach().cos() * y.detach())
    assert len(notes["graphs"]) == 2
    assert "cos" in notes["joint"].code
    assert notes["sources"] == ["x", "y"]
    assert len(notes["fakes"]) == 2
    assert len(notes["metadata"].input_info) == 2


def test_a_node_that_dynamo_did_not_make_has_no_source() -> None:
    assert dynamo.source_of(fx.Graph().placeholder("x")) == ""


def test_inputs_are_named_by_the_variable_that_holds_them() -> None:
    notes = capture(
        lambda pair, array: (pair[0] * torch.from_numpy(array)).sum(),
        [torch.rand(3, requires_grad=True)],
        np.ones(3, np.float32),
    )
    assert set(notes["sources"]) == {"pair", dynamo.ARRAY}


def test_outputs_are_told_from_new_values_of_inputs() -> None:
    def loss(x: Tensor, count: Tensor) -> Tensor:
        count.add_(1)
        return x.sum()

    graph = capture(loss, torch.rand(3, requires_grad=True), torch.zeros(()))["joint"].graph
    inputs = graph.find_nodes(op="placeholder")
    count = next(node for node in inputs if node.meta["val"].ndim == 0)
    assert dynamo.inputs_written(graph)[:2] == [count, None]
    assert dynamo.place_of_result(graph, 2) == 1


def hooked(x: Tensor) -> Tensor:
    y = x.sin()
    y.register_hook(lambda gradient: 2 * gradient)
    return y.sum()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo's own, on torch 2.11
@pytest.mark.parametrize(("loss", "expected"), [(hooked, True), (lambda x: x.sin().sum(), False)])
def test_gradients_of_its_own_are_seen_in_a_graph(loss: Any, expected: bool) -> None:
    assert capture(loss, torch.rand(3, requires_grad=True))["own gradients"] is expected


def test_ops_know_their_module_and_their_line_and_gradients_of_outputs_their_name() -> None:
    model = nn.Sequential(nn.Sequential(nn.Tanh()))
    graph = capture(lambda batch: model(batch).sum(), torch.rand(3, requires_grad=True))["joint"].graph
    ran, path = {(op.target, dynamo.module_path(op)) for op in graph.nodes}, "L.model.0.0"
    aten = torch.ops.aten
    assert {(aten.tanh.default, path), (aten.tanh_backward.default, path), (aten.sum.default, "")} <= ran
    x, tangent = graph.find_nodes(op="placeholder")
    assert [dynamo.is_tangent(each) for each in (x, tangent)] == [False, True]
    assert dynamo.module_path(x) == ""


def test_errors_of_dynamo_are_told_apart() -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise ValueError("on purpose")

    def number(x: Tensor) -> float:
        return x.sum().item() if x.sum() > 0 else 0.0

    errors: list[BaseException] = [ValueError("of somebody else")]
    doubled = torch.compile(lambda x, n: x * n, backend="eager", fullgraph=True, dynamic=False)
    doubled(torch.ones(2), 1)
    for compiled, args in (
        (torch.compile(lambda x: x * 2, backend=broken), ()),
        (torch.compile(number, backend="eager", fullgraph=True), ()),
        (doubled, (2,)),
    ):
        try:
            with torch._dynamo.config.patch(recompile_limit=1):
                compiled(torch.ones(2), *args)
        except Exception as error:
            errors.append(error)
    assert [type(dynamo.cause_of(error)) for error in errors[:2]] == [ValueError, ValueError]
    assert [dynamo.is_uncaptured(error) for error in errors] == [False, False, True, False]
    assert [dynamo.is_recaptured_too_often(error) for error in errors] == [False, False, False, True]


def test_a_function_is_marked_as_boxed_as_aot_autograd_marks_its_own() -> None:
    def run(args: list[Any]) -> Any:
        return args

    dynamo.mark_boxed(run)
    assert vars(run).items() <= vars(dynamo.make_boxed(lambda: 0)).items()
    assert vars(run)


def test_settings_are_changed_in_a_block() -> None:
    before = dynamo.dynamo_config().cache_size_limit
    with dynamo.dynamo_config().patch({"cache_size_limit": before + 1}):
        assert dynamo.dynamo_config().cache_size_limit == before + 1
    assert dynamo.dynamo_config().cache_size_limit == before


def test_what_was_compiled_is_freed() -> None:
    held: list[weakref.ref[Any]] = []

    def backend(graph: fx.GraphModule, _: Any) -> Any:
        held.append(weakref.ref(graph))
        return graph.forward

    def double(x: Tensor) -> Tensor:
        return x * 2

    torch.compile(double, backend=backend)(torch.ones(2))
    gc.collect()
    assert held[0]() is not None
    dynamo.forget_compiled(double.__code__, backend)
    gc.collect()
    assert held[0]() is None


def test_what_failed_is_freed() -> None:
    held: list[weakref.ref[Any]] = []

    def backend(graph: fx.GraphModule, inputs: Any) -> Any:
        held.append(weakref.ref(graph))
        raise ValueError("on purpose")

    with contextlib.suppress(Exception):
        try:
            torch.compile(lambda x: x * 2, backend=backend)(torch.ones(2))
        except Exception as error:
            dynamo.forget_failed(error)
            raise
    gc.collect()
    assert held[0]() is None
    dynamo.forget_failed(ValueError("of somebody else"))


def test_a_compiled_module_knows_its_original() -> None:
    plain = nn.Linear(1, 1)
    wrapped: Any = torch.compile(plain, backend="eager")
    assert dynamo.compiled_module(plain) is None
    assert dynamo.compiled_module(wrapped) is plain


def test_the_graphs_of_inductor_are_found_where_it_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    found = dynamo.inductor_graph(imports=True)
    assert callable(found.__call__)
    assert dynamo.inductor_graph(imports=False) is found
    monkeypatch.delitem(sys.modules, "torch._inductor.output_code")
    assert dynamo.inductor_graph(imports=False) is None


def test_frames_of_compiled_graphs_are_in_the_package_of_aot_autograd() -> None:
    torch.compile(lambda x: x * 2, backend="aot_eager")(torch.ones(2))
    assert dynamo.AOT_AUTOGRAD in sys.modules


def test_a_logger_is_silenced_in_a_block(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger(dynamo.METRICS)
    with dynamo.silenced(dynamo.METRICS):
        log.error("nothing")
    assert not caplog.records
    assert not log.disabled


def test_the_logger_of_metrics_is_one_of_dynamo() -> None:
    torch.compile(lambda x: x * 2, backend="eager")(torch.ones(2))
    assert sys.modules[dynamo.METRICS].log.name == dynamo.METRICS
