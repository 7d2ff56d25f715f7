"""What kernels allocate inside themselves is measured once for each kind of op, where that decides it."""

import contextlib

import pytest
import torch
from torch import nn

from lowtide import Workload
from lowtide.errors import TraceError
from lowtide.tracing import trace


def workload(loss):
    torch.manual_seed(0)
    return Workload(nn.Linear(4, 4), lambda model, x: model(x).mean() + loss(x), torch.randn(8, 4))


def test_masks_are_measured_each():
    values, few, many = torch.randn(200_000), torch.zeros(200_000).bool(), torch.ones(200_000).bool()
    few[:10] = True
    for first, second in ((few, many), (many, few)):
        graph = trace(workload(lambda x, a=first, b=second: values[a].sum() + values[b].sum()))
        inside = [op.workspace_bytes for op in graph.ops if op.name == "aten.index.Tensor"]
        assert max(inside) > 100 * min(inside)
        assert (inside[0] > inside[1]) == (first is many)


def test_an_op_that_fails_and_is_caught_leaves_no_trace():
    def loss(x):
        with contextlib.suppress(RuntimeError):
            torch.mm(x, x)
        return x.sum()

    names = [op.name for op in trace(workload(loss)).ops if op.phase == "forward"]
    assert "aten.mm.default" not in names
    assert "aten.sum.default" in names


def test_a_step_with_a_profiler_of_its_own_is_refused_in_words():
    def loss(x):
        with torch.profiler.profile():
            return x.sinc().sum()

    with pytest.raises(TraceError, match="profiler of its own"):
        trace(workload(loss))
    trace(workload(lambda x: x.sum()))  # the profiler is off again
