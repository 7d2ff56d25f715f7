"""CUDA's private parts; most need a GPU."""

from __future__ import annotations

from pkgutil import resolve_name

import pytest
import torch

from lowtide.compat import cuda
from lowtide.errors import TraceError
from tests.refusals import refused


@pytest.mark.gpu
def test_the_current_stream_is_that_of_torch() -> None:
    assert cuda.current_stream(0) == torch.cuda.current_stream(0).cuda_stream


@pytest.mark.gpu
def test_a_gpu_sleeps_for_some_cycles() -> None:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    cuda.sleep(10_000_000)
    end.record()
    torch.cuda.synchronize()
    assert start.elapsed_time(end) > 1


@pytest.mark.gpu
def test_a_failed_capture_is_abandoned() -> None:
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    with (
        pytest.raises(RuntimeError),
        torch.cuda.stream(torch.cuda.current_stream()),
        torch.cuda.graph(graph, pool=pool),
    ):
        torch.ones(4, device="cuda").cpu()
    cuda.abandon_capture(torch.device("cuda"), pool)
    torch.cuda.empty_cache()
    assert torch.rand(2, device="cuda").isfinite().all()


@pytest.mark.gpu
def test_workspaces_of_products_are_freed() -> None:
    a = torch.ones(64, 64, device="cuda")
    cuda.clear_matmul_workspaces()
    before = torch.cuda.memory_allocated()
    a @ a
    assert torch.cuda.memory_allocated() > before
    cuda.clear_matmul_workspaces()
    assert torch.cuda.memory_allocated() == before


@pytest.mark.gpu
def test_cudnn_keeps_bytes_for_backward_where_torch_takes_it() -> None:
    x, vector = torch.ones(4, 8, 5, 5, device="cuda"), torch.ones(8, device="cuda")
    out = torch.ops.aten.cudnn_batch_norm.default(x, vector, vector, vector.clone(), vector.clone(), True, 0.1, 1e-5)
    assert cuda.takes_cudnn_batchnorm([x, vector, vector, vector, vector], 1e-5)
    assert cuda.batchnorm_reserve_bytes(x) == out[3].numel()


def test_torch_takes_no_cudnn_on_a_cpu() -> None:
    x, vector = torch.ones(4, 8, 5, 5), torch.ones(8)
    assert not cuda.takes_cudnn_batchnorm([x, vector, vector, vector, vector], 1e-5)


def test_a_device_guard_is_refused_on_other_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    with cuda.device_guard():
        pass
    monkeypatch.setattr(torch, "__version__", "3.0.0")
    with refused("3.0.0", kind=TraceError), cuda.device_guard():
        pass


def test_the_paths_of_torchs_questions_about_a_gpu_are_there() -> None:
    for path in (cuda.USES_CUDNN, cuda.LACKS_AMP):
        assert callable(resolve_name(path))
