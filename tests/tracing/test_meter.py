"""Workspaces are measured once for each kind of op, where the kind decides their bytes."""

import contextlib

import numpy as np
import pytest
import torch
from torch import nn

from lowtide import Workload
from lowtide.errors import TraceError
from lowtide.tracing import meter, trace, tracer


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
        with torch.profiler.profile(acc_events=True):
            return x.sinc().sum()

    with pytest.raises(TraceError) as error:
        trace(workload(loss))
    assert "profiler" in str(error.value)
    trace(workload(lambda x: x.sum()))  # the profiler is off again


MIB = 2**20


class Event:
    """Stands in for a device's clock."""

    def __init__(self, enable_timing=False):
        pass

    def record(self):
        pass

    def elapsed_time(self, other):
        return 1.0


class Allocator:
    """Stands in for the caching allocator: 5 MiB of a library come with the first op."""

    def __init__(self, monkeypatch, start_bytes):
        self.start_bytes, self.ops = start_bytes, -1
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda *_: None)
        monkeypatch.setattr(meter, "sleep", lambda _: None)
        monkeypatch.setattr(meter, "tensor_bytes", lambda _: start_bytes)
        monkeypatch.setattr(meter.CudaMeter, "_allocated", lambda _: self.allocated())
        monkeypatch.setattr(meter.CudaMeter, "granularity", 1)
        monkeypatch.setattr(tracer, "_meter", lambda _, aside, *__, **___: meter.CudaMeter(torch.device("cuda"), aside))

    def allocated(self):
        self.ops += 1  # read at the start, then before and after each op
        size = self.start_bytes + (5 * MIB if self.ops > 1 else 0)
        return {"current": size, "peak": size}


def test_other_tensors_are_the_bytes_at_the_start_beyond_the_steps_own(monkeypatch):
    work = workload(lambda x: x.sum())
    own = trace(work).static_bytes
    gradient = torch.ones(100)
    work.model.bias.grad = gradient[:4]  # set aside
    Allocator(monkeypatch, own + 4 * 4 + 10 * MIB)
    graph = trace(work)
    assert graph.other_bytes == 10 * MIB
    held = sum(s.bytes for s in graph.storages if s.category == "workspace")
    assert held == pytest.approx(5 * MIB, abs=1000)
    assert graph.peak_bytes == pytest.approx(own + 5 * MIB, abs=1000)


def test_memory_that_the_allocator_does_not_count_is_not_subtracted():
    readings = meter.CudaMeter(torch.device("cuda")).readings(np.zeros(0, np.int64), 400)
    assert (readings.other_bytes, readings.held_bytes) == (0, 0)


def test_tensor_bytes_leave_out_two_workspaces_of_cublas(monkeypatch):
    def block(size, state="active_allocated"):
        return {"requested_size": size, "state": state}

    blocks = [block(100), block(32 * MIB), block(32 * MIB), block(32 * MIB), block(7, "inactive")]
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    segments = [{"device": 0, "blocks": blocks}, {"device": 1, "blocks": [block(5)]}]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    assert meter.tensor_bytes(torch.device("cuda", 0)) == 512 + 32 * MIB
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    assert meter.tensor_bytes(torch.device("cuda", 0)) == 512 + 3 * 32 * MIB


def test_pools_of_cuda_graphs_hold_what_is_free_in_them(monkeypatch):
    def segment(device, pool, total, allocated):
        return {"device": device, "segment_pool_id": pool, "total_size": total, "allocated_size": allocated}

    segments = [
        segment(0, (0, 0), 50, 10),
        segment(0, (0, 1), 30, 10),
        segment(0, (0, 2), 5, 5),
        segment(1, (0, 1), 9, 0),
    ]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    assert meter.pooled_bytes(torch.device("cuda", 0)) == 20


@pytest.mark.gpu
def test_matrix_products_leave_no_other_bytes_behind():
    x = torch.ones(256, 256, device="cuda", requires_grad=True)
    before = meter.tensor_bytes(x.device)
    (x @ x).sum().backward()  # in both threads
    x.grad = None
    assert meter.tensor_bytes(x.device) == before
