"""Lives are those that reference counters give; a result takes over an input only if nothing is lost by it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor, nn

from lowtide import Workload
from lowtide.errors import LowtideError
from lowtide.planning.programs.liveness import (
    Access,
    Life,
    Order,
    in_place,
    lives,
    lives_in_place,
    order_of,
    peak_bytes,
)
from lowtide.planning.programs.strategies import plain
from lowtide.tracing.capture.joint import Joint
from lowtide.tracing.capture.loss import capture_joint
from tests.models import Call, InTurn
from tests.planning.orders import EXP, convolutions, lstm, mlp, orders
from tests.refusals import refused


def test_the_courses_example_takes_three_two_or_one_buffer() -> None:
    assert sum(EXP.bytes) == 12
    assert lives(EXP) == [Life(0, 1, 4), Life(1, 2, 4), Life(2, 2, 4)]
    assert peak_bytes(lives(EXP)) == 8
    assert lives_in_place(EXP) == [Life(0, 2, 4)]


def test_a_value_that_is_read_again_is_not_written_over() -> None:
    order = Order((Access((), (0,)), Access((0,), (1,), (0,)), Access((0, 1), (2,), (0, 1))), (4, 4, 4))
    assert in_place(order) == [0, 1, 0]


def test_neither_kept_values_nor_those_of_another_size_are_written_over() -> None:
    ops = (Access((), (0, 1)), Access((0, 1), (2,), (0, 1)))
    assert in_place(Order(ops, (4, 8, 4), frozenset({0}))) == [0, 1, 2]
    assert in_place(Order(ops, (4, 8, 8))) == [0, 1, 1]


def test_two_results_do_not_take_the_same_input() -> None:
    assert in_place(Order((Access((), (0,)), Access((0,), (1, 2), (0,))), (4, 4, 4))) == [0, 0, 2]


def test_a_value_that_nobody_reads_lives_for_its_op_and_a_kept_one_to_the_end() -> None:
    order = Order((Access((), (0, 1)), Access((), (2,))), (1, 2, 4), frozenset({1}))
    assert lives(order) == [Life(0, 0, 1), Life(0, 1, 2), Life(1, 1, 4)]


@pytest.mark.parametrize(
    ("ops", "sizes", "said"),
    [
        ((Access((0,), ()),), (), "which no op before it makes"),
        ((Access((), (0,)), Access((), (0,))), (1,), "exist already"),
        ((Access((), (0,)), Access((), (1,), (0,))), (1, 1), "would write over"),
        ((Access((), (0,)),), (1, 1), "2 sizes"),
    ],
)
def test_an_order_that_cannot_run_is_refused(ops: tuple[Access, ...], sizes: tuple[int, ...], said: str) -> None:
    with refused(said, kind=LowtideError):
        Order(ops, sizes)


@given(orders())
def test_the_peak_is_what_reference_counters_count(order: Order) -> None:
    counters = [sum(value in op.reads for op in order.ops) + (value in order.kept) for value in range(len(order.bytes))]
    live = peak = 0
    for op in order.ops:
        live += sum(order.bytes[value] for value in op.makes)
        peak = max(peak, live)
        for value in op.reads:
            counters[value] -= 1
            live -= 0 if counters[value] else order.bytes[value]
        live -= sum(order.bytes[value] for value in op.makes if not counters[value])
    assert peak_bytes(lives(order)) == peak


@given(orders())
def test_no_buffer_is_written_over_while_its_value_is_needed(order: Order) -> None:
    holds: dict[int, int] = {}  # what each buffer holds
    buffers = in_place(order)
    for op in order.ops:
        assert all(holds[buffers[value]] == value for value in op.reads)
        holds.update((buffers[value], value) for value in op.makes)
    assert all(holds[buffers[value]] == value for value in order.kept)


@given(orders())
def test_in_place_never_takes_more(order: Order) -> None:
    apart, merged = lives(order), lives_in_place(order)
    assert sum(life.bytes for life in merged) <= sum(order.bytes)
    assert peak_bytes(merged) <= peak_bytes(apart) <= sum(order.bytes)


# -- orders of real steps ------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [mlp, convolutions, lstm])
def test_the_peak_of_a_steps_order_is_that_of_its_graph_as_fx_runs_it(make: Any) -> None:
    """The joint graph is run op by op on real tensors, each let go after its last use; live storages are counted."""
    joint = capture_joint(make(3))
    assert peak_bytes(lives(order_of(joint, plain(joint)))) == executed_peak(joint)


def executed_peak(joint: Joint) -> int:
    ops = [*joint.forward, *joint.backward]
    values: dict[Any, Any] = {
        node: torch.zeros_like(node.meta["val"], device="cpu") for node in (*joint.primals, *joint.tangents)
    }
    given = set(values)
    outside = {tensor.untyped_storage()._cdata for tensor in values.values()}
    last = {value: i for i, node in enumerate(ops) for value in (node, *node.all_input_nodes)}
    after_forward = len(joint.forward) - 1
    for node in joint.outputs[:-1]:
        last[node] = max(last.get(node, 0), after_forward)
    for node in (joint.outputs[-1], *joint.gradients):
        last[node] = len(ops)
    peak = 0
    with torch.utils._python_dispatch._disable_current_modes():
        for i, node in enumerate(ops):
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs)
            storages: dict[int, int] = {}
            for value in values.values():
                for tensor in value if isinstance(value, (tuple, list)) else [value]:
                    if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in outside:
                        storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
            peak = max(peak, sum(storages.values()))
            for done in [each for each in values if last.get(each) == i and each not in given]:
                del values[done]
    return peak


def test_an_op_does_not_write_over_what_it_reads_in_another_layout() -> None:
    """x + x.t() in place of x would read what it has written."""
    turned = Call(lambda m, x: (y := x @ m.weight) + y.t(), weight=nn.Parameter(torch.randn(8, 8)))
    joint = capture_joint(Workload(turned, lambda model, x: model(x).sum(), torch.randn(8, 8)))
    order = order_of(joint, plain(joint))
    assert [op.over for op in order.ops if op.makes == (1,)] == [()]


def test_what_a_split_gives_is_counted_once() -> None:
    joint = capture_joint(
        Workload(InTurn(nn.Linear(8, 32), each=split), lambda model, x: model(x).sum(), torch.randn(64, 8))
    )
    order = order_of(joint, plain(joint))
    assert order.bytes[:3] == (64 * 32 * 4, 64 * 8 * 4, 64 * 8 * 4)  # of addmm, sigmoid and the first product
    assert peak_bytes(lives(order)) == executed_peak(joint)


def split(linear: nn.Module, x: Tensor) -> Tensor:
    a, b, c, d = linear(x).chunk(4, 1)
    return torch.sigmoid(a) * b + c * d
