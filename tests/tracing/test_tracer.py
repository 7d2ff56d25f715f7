"""Tracing changes nothing, and says clearly what it cannot do."""

import pytest
import torch
from torch import nn

from lowtide import Workload, zoo
from lowtide.errors import TraceError, WorkloadError
from lowtide.tracing import trace
from tests.models import Call
from tests.tracing.comparing import assert_same, snapshot
from tests.tracing.layers import mean_loss


def trained(name, **changes):
    """A workload in the middle of training: optimizer state, gradients, running statistics."""
    work = zoo.small(name, **changes)
    for _ in range(2):
        work.compute_loss().backward()
        if work.optimizer is not None:
            work.optimizer.step()
    return work


@pytest.mark.parametrize("fake", [False, True], ids=["real", "fake"])
@pytest.mark.parametrize("name", ["resnet18", "gpt2", "lstm"])
def test_tracing_changes_nothing(name, fake):
    work = trained(name)
    before = snapshot(work)
    trace(work, fake=fake)
    assert_same(before, snapshot(work))


def test_a_graph_built_before_the_trace_still_runs_backward():
    """In-place restores would otherwise trip autograd's version check."""
    work = trained("lenet")
    loss = work.compute_loss()
    trace(work)
    loss.backward()


def test_an_error_in_the_step_leaves_everything_as_it_was():
    work = trained("lenet")
    broken = Workload(work.model, lambda model, batch: mean_loss(model, batch[0]) / [], work.batch, work.optimizer)
    before = snapshot(work)
    for fake in (False, True):
        with pytest.raises(TypeError):
            trace(broken, fake=fake)
        assert_same(before, snapshot(work))


def test_a_real_step_is_not_of_another_device():
    with pytest.raises(TraceError) as error:
        trace(zoo.small("lenet"), device="h200")
    assert "fake=True" in str(error.value)


def test_a_running_profiler_is_left_alone_and_the_graph_says_what_is_missing():
    work = zoo.small("lenet")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True):
        graph = trace(work)
    assert any("profiler" in note for note in graph.notes)
    assert graph.storage_peak_bytes == trace(work).storage_peak_bytes


def test_two_dtypes_on_one_storage_count_once():
    base = torch.zeros(1000)
    work = Workload(nn.Linear(10, 1), lambda model, b: model(b[0].view(100, 10)).mean(), (base, base.view(torch.int32)))
    real, fake = trace(work), trace(work, fake=True)
    assert real.storage_peak_bytes == fake.storage_peak_bytes
    assert [s.bytes for s in fake.storages if s.category == "input"] == [4000]


def test_a_scalar_parameter_is_predicted_on_the_gpu():
    model = Call(lambda m, x: m.linear(x) * m.scale, linear=nn.Linear(4, 4), scale=nn.Parameter(torch.ones(())))
    graph = trace(Workload(model, mean_loss, torch.randn(3, 4)), fake=True, device="h200")
    assert {s.device for s in graph.storages if s.category == "parameter"} == {"cuda"}


def test_lbfgs_is_refused_with_the_reason():
    model = nn.Linear(4, 4)
    with pytest.raises(WorkloadError) as error:
        trace(Workload(model, mean_loss, torch.randn(3, 4), torch.optim.LBFGS(model.parameters())))
    assert "LBFGS" in str(error.value)


@pytest.mark.parametrize(
    "batch",
    [torch.randn(0, 4), torch.full((3, 4), torch.nan), torch.randn(1, 4).expand(5, 4)],
    ids=["empty", "nan", "expanded"],
)
def test_unusual_batches_are_traced_and_predicted_alike(batch):
    work = Workload(nn.Linear(4, 2), lambda model, x: model(x).sum(), batch)
    assert trace(work).storage_peak_bytes == trace(work, fake=True).storage_peak_bytes
