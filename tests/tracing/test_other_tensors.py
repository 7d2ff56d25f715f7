"""Other tensors of the process are shown apart from a step's own. The allocator's counter has a stand-in on a CPU."""

import numpy as np
import pytest
import torch
from torch import nn

from lowtide import Workload, apply, plan, profile, zoo
from lowtide.tracing import meter, trace, tracer
from lowtide.tracing.other_tensors import OtherTensors
from lowtide.tracing.snapshot.held_tensors import tensors_of

MIB = 2**20
CPU = torch.device("cpu")


def mean(model, x):
    return model(x).square().mean()


def test_other_tensors_are_found_once_each_and_no_longer_than_they_live():
    work = Workload(nn.Linear(4, 4), mean, torch.randn(8, 4))
    before = OtherTensors(CPU, tensors_of(work)).bytes
    large = torch.empty(1000)
    views = [large[:10], large.view(10, 100)]
    others = OtherTensors(CPU, tensors_of(work))
    assert others.bytes == before + 4000
    del large, views
    assert others.bytes == before


def test_tensors_that_the_step_holds_are_none_of_the_others():
    mask = torch.ones(1000)
    model = nn.BatchNorm1d(4)
    model.cache = {"kept": torch.ones(500)}
    optimizer = torch.optim.Adam(model.parameters())
    work = Workload(model, lambda model, x: (model(x) * mask[:4]).mean(), torch.randn(8, 4), optimizer)
    work.compute_loss().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert OtherTensors(CPU, []).bytes - OtherTensors(CPU, tensors_of(work)).bytes >= 4000 + 2000 + 8 * 4 * 4


class Event:
    """Stands in for a device's clock."""

    def __init__(self, enable_timing=False):
        pass

    def record(self):
        pass

    def elapsed_time(self, other):
        return 1.0


class Counter(meter.CudaMeter):
    """Reads a stand-in for the caching allocator: 5 MiB of a library beside what tensors on the CPU hold."""

    granularity = 1

    def __init__(self):
        super().__init__(torch.device("cuda"))

    def _allocated(self):
        held = OtherTensors(CPU, []).bytes + 5 * MIB
        return {"current": held, "peak": held}


@pytest.fixture
def counted(monkeypatch):
    """Trace as on a GPU: with counters of the whole process."""
    monkeypatch.setattr(torch.cuda._utils, "_get_device_index", lambda *_, **__: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda _: None)
    monkeypatch.setattr(torch._C, "_cuda_resetPeakMemoryStats", lambda _: None, raising=False)
    monkeypatch.setattr(tracer, "_meter", lambda *_: Counter())
    monkeypatch.setattr(tracer, "_counts_whole_process", lambda device: True)


def test_a_profile_does_not_count_other_tensors(counted):
    work = Workload(nn.Linear(64, 64), mean, torch.randn(8, 64))
    alone = trace(work)
    other = torch.ones(10 * MIB)
    beside = trace(work)
    assert beside.other_bytes - alone.other_bytes == other.nbytes
    assert beside.peak_bytes == alone.peak_bytes
    assert sum(s.bytes for s in beside.storages if s.category == "workspace") == pytest.approx(5 * MIB, abs=1000)


def test_a_tensor_that_the_loss_uses_is_the_steps(counted):
    mask = [torch.ones(64)]  # held by none of the modules
    work = Workload(nn.Linear(64, 64), lambda model, x: (model(x) * mask[0]).mean(), torch.randn(8, 64))
    graph = trace(work)
    assert [s.bytes for s in graph.storages if s.label == "held beside model and batch"] == [256]


def test_memory_that_the_allocator_does_not_count_is_not_subtracted():
    readings = Counter()
    readings._start = 1000
    found = readings.readings(np.zeros(0, np.int64), static_bytes=400, other_bytes=5000)
    assert (found.other_bytes, found.held_bytes) == (600, 0)


def test_a_measured_step_is_judged_without_other_tensors(recwarn):
    work = Workload(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)), mean, torch.randn(512, 64))
    found = plan(work, "100%", engine="eager")
    other, small = torch.ones(MIB), torch.ones(100)
    with apply(found, work) as step:
        step._others = OtherTensors(CPU, tensors_of(work))
        step._note(1.0, found.peak_bytes + step._others.bytes)
        assert step.measured.peak_bytes == found.peak_bytes
        assert not recwarn
        before = step._others.bytes
        del other
        with pytest.warns(RuntimeWarning, match="beside .* of other tensors in this process"):
            step._note(1.0, found.peak_bytes + before)
    assert small.all()


@pytest.mark.gpu
def test_other_tensors_on_the_gpu_change_no_peak():
    work = zoo.small("gpt2", device="cuda")
    trace(work)
    alone = profile(work)
    other = torch.ones(100 * MIB, device="cuda")
    beside = profile(work)
    assert beside.other_bytes - alone.other_bytes == other.nbytes
    assert beside.peak_bytes == pytest.approx(alone.peak_bytes, rel=0.001)
    with apply(plan(work, "100%", profile=beside, engine="eager"), work) as step:
        for _ in range(3):
            step(work.batch)
        assert step.measured.peak_bytes == pytest.approx(alone.peak_bytes, rel=0.02)
