"""Kernels' own allocations: measured once, remembered, looked up."""

import gc
import os

import pytest
import torch
from torch import nn

from lowtide import Workload, zoo
from lowtide.nn import chunked_loss
from lowtide.profiling import profile
from lowtide.profiling.kernels import Workspaces, kernel_key, known_kernels, measure
from lowtide.tracing.op_calls import Call


def convolution():
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1))
    return Workload(model, lambda model, batch: model(batch).mean(), torch.randn(4, 3, 32, 32))


def test_a_fake_step_with_measured_kernels_has_the_real_allocated_peak():
    work = convolution()
    real, fake = profile(work), profile(work, fake=True, measure=True)
    assert real.peak_bytes > real.storage_peak_bytes  # the convolutions do allocate inside themselves
    assert fake.peak_bytes == real.peak_bytes
    assert fake.workspace_source == "measured"


def test_a_seen_workspace_comes_before_a_measured_one_and_a_similar_one_last():
    graph = profile(convolution(), fake=True, measure=True).graph
    key, size = next((op.signature, op.workspace_bytes) for op in graph.ops if op.workspace_bytes)
    assert Workspaces(graph).get(key) == size
    assert Workspaces(graph, seen=[(key, 1), (key, 3), (key, 2)]).get(key) == 3
    assert Workspaces(graph, seen=[("similar", 5)]).get(key, "similar") == size
    assert Workspaces(graph, seen=[("similar", 5)], from_table=False).get(key, "similar") == 5
    assert Workspaces(graph, from_table=False).get(key) is None


def test_measurements_serve_the_next_profile():
    work = convolution()
    first = profile(work, fake=True)
    assert first.workspace_source == "none"
    measured = profile(work, fake=True, measure=True)
    assert profile(work, fake=True).peak_bytes == measured.peak_bytes > first.peak_bytes
    assert known_kernels("cpu")


def test_sizes_of_lowtides_own_ops_are_measured_each_time():
    """Its next version may take other bytes."""
    args = (
        torch.randn(4, 8),
        torch.randn(6, 8),
        None,
        torch.zeros(4, dtype=torch.int64),
        -100,
        0.0,
        0.0,
        True,
        [True] * 3,
    )
    own = Call.of(getattr(torch.ops.lowtide, chunked_loss.OP).default, args, {})
    copied = Call.of(torch.ops.aten.t.default, (torch.randn(4, 8),), {})
    sizes = measure({"own": own, "copied": copied}, torch.device("cpu"), "cpu")
    assert sizes[kernel_key("own")] >= 4 * 6 * 4  # the logits, which no storage of the graph holds
    assert known_kernels("cpu").keys() == {kernel_key("copied")}


def test_a_broken_cache_is_not_a_broken_profile():
    work = convolution()
    profile(work, fake=True, measure=True)
    folder = os.environ["LOWTIDE_CACHE"]
    for name in os.listdir(folder):
        with open(os.path.join(folder, name), "w") as file:
            file.write("{")
    assert profile(work, fake=True).workspace_source == "none"


def test_measuring_does_not_move_the_generators():
    work = convolution()
    state = torch.get_rng_state()
    profile(work, fake=True, measure=True)
    assert torch.equal(torch.get_rng_state(), state)


def test_contiguous_convolutions_hold_a_copy_in_the_other_layout_on_a_gpu():
    work = convolution()
    shown = profile(work, device="a100")
    first = next(op for op in shown.graph.ops if op.name == "aten.convolution.default")
    assert first.workspace_bytes == sum(v.bytes for v in (*first.inputs[:2], *first.outputs))
    nhwc = Workload(
        work.model.to(memory_format=torch.channels_last), work.loss, work.batch.to(memory_format=torch.channels_last)
    )
    second = [op for op in profile(nhwc, device="a100").graph.ops if op.name == "aten.convolution.default"][1]
    assert second.workspace_bytes == 0


def test_matrix_products_bring_cublas_workspaces():
    shown = profile(zoo.small("gpt2"), device="h200")
    held = [s for s in shown.graph.storages if s.category == "workspace"]
    assert [s.bytes for s in held] == [64 * 2**20]  # one for each thread: forward and backward


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "sizes"),
    [("resnet18", {"batch": 64}), ("wrn28-2", {"batch": 100}), ("gpt2", {"batch": 4, "seq": 512})],
)
def test_measured_kernels_predict_the_allocators_peak_on_the_gpu(name, sizes):
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    others = torch.cuda.memory_allocated()  # what other tests left
    work = zoo.workload(name, device="cuda", **sizes)
    for _ in range(3):
        work.model.zero_grad(set_to_none=True)
        torch.cuda.reset_peak_memory_stats()
        work.compute_loss().backward()
        work.optimizer.step()
    plain = torch.cuda.max_memory_allocated() - others
    assert profile(work, fake=True, measure=True).peak_bytes == pytest.approx(plain, rel=0.02)


def test_the_measurements_of_the_h200_come_with_the_package():
    assert known_kernels("h200")
    assert not known_kernels("v100")
    shown = profile(zoo.workload("wrn28-2", batch=100, device="meta"), device="h200")
    assert shown.workspace_source != "none"
    assert shown.peak_bytes == pytest.approx(540_109_824, rel=0.01)  # as measured on the H200
