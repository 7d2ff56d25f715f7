"""Op calls: what their arguments say, and calls without tensors that are repeated alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lowtide import zoo
from lowtide.kernels import batchnorm_ops
from lowtide.profiling import profile
from lowtide.tracing.op_calls import Call, draws, trains
from lowtide.workload import Workload
from tests.models import squares

aten = torch.ops.aten
X = torch.ones(1, 1, 2, 8)


@pytest.mark.parametrize(
    ("op", "args", "kwargs", "expected"),
    [
        (aten.native_dropout.default, (X, 0.5, True), {}, True),
        (aten.bernoulli_.float, (X, 0.5), {}, True),
        (aten.rand_like.default, (X,), {}, True),
        (aten._scaled_dot_product_flash_attention_for_cpu.default, (X, X, X), {}, False),
        (aten._scaled_dot_product_flash_attention_for_cpu.default, (X, X, X, 0.0, True), {}, False),
        (aten._scaled_dot_product_flash_attention_for_cpu.default, (X, X, X, 0.1), {}, True),
        (aten._scaled_dot_product_efficient_attention.default, (X, X, X, None, False), {"dropout_p": 0.1}, True),
        (aten.mm.default, (X, X), {}, False),
    ],
)
def test_an_op_draws_where_torch_says_so_and_something_is_dropped(op, args, kwargs, expected) -> None:
    assert draws(op, args, kwargs) is expected


@pytest.mark.parametrize("training", [True, False])
def test_a_batch_norm_says_whether_it_trains(training: bool) -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)).train(training)
    graph = profile(Workload(model, squares, torch.randn(2, 1, 8, 8))).graph
    norms = [op for op in graph.ops if "batch_norm" in op.name and op.phase == "forward"]
    assert [op.is_training for op in norms] == [training]
    assert not any(op.is_training for op in graph.ops if "batch_norm" not in op.name)
    assert trains(aten.mm.default, (X, X), {}) is False


def test_a_trace_tells_shapes_of_the_batch_and_keys_of_the_state() -> None:
    work = zoo.small("lenet")
    work = Workload(work.model, work.loss, work.batch, torch.optim.AdamW(work.model.parameters()))
    graph = profile(work).graph
    inputs = {s.shape for s in graph.storages if s.category == "input"}
    assert inputs == {tuple(tensor.shape) for tensor in work.tensors()}
    states = [s for s in graph.storages if s.category == "optimizer state"]
    assert {s.state_key for s in states} == {"exp_avg", "exp_avg_sq", "step"}
    assert {s.shape for s in states if s.state_key == "exp_avg"} == {tuple(p.shape) for p in work.model.parameters()}
    assert all(s.made_by for s in graph.storages if s.category == "activation")


def test_a_call_is_repeated_with_the_same_shapes():
    x = torch.ones(4, 3).t()
    call = Call.of(aten.add.Tensor, (x, torch.ones(3, 1, dtype=torch.bfloat16)), {"alpha": 2})
    args, kwargs = call.tensors(torch.device("cpu"))
    assert [(t.shape, t.stride(), t.dtype) for t in args] == [
        ((3, 4), (1, 3), torch.float32),
        ((3, 1), (1, 1), torch.bfloat16),
    ]
    assert kwargs == {"alpha": 2}
    assert call.function(*args, **kwargs).shape == (3, 4)


@pytest.mark.parametrize(
    ("function", "args", "alone"),
    [
        (aten.mm.default, (torch.ones(2, 2), torch.ones(2, 2)), True),
        (aten._foreach_add_.Scalar, ([torch.ones(2)], 1), False),
        (aten.mul.Tensor, (torch.ones(2, dtype=torch.uint8), 2), False),  # bytes may be a library's own record
        (aten.mul.Tensor, (torch.ones(2, device="meta"), 2), False),
        (batchnorm_ops.STATISTICS, (X, None, None, 0.1, 1e-5), True),
    ],
)
def test_calls_whose_values_matter_do_not_run_alone(function, args, alone):
    assert Call.of(function, args, {}).runs_alone == alone
