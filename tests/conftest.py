"""Fixtures of all tests: GPU tests run if there is a GPU, and each test has its own kernel cache."""

import gc
import os
import sys
from collections.abc import Callable

import pytest
import torch

from lowtide.compat.frames import evaluate_frames_by_default
from lowtide.errors import TraceError
from lowtide.techniques import registry

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device (make gpu-test)")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(autouse=True, scope="module")
def _quick_collections() -> None:
    """Exempt objects that outlive a file from garbage collection, which takes a second with all tests in memory."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _untimed_guards() -> None:
    """Keep Dynamo from timing its guards: it flushes the CPU's caches for that, 60 ms at each compilation."""
    if guards := sys.modules.get("torch._dynamo.guards"):
        guards.profile_guard_manager = lambda *_: 0.0


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # extensions that look for leaks at exit would report frozen objects


@pytest.fixture(autouse=True)
def _own_kernel_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path / "cache"))


@pytest.fixture(autouse=True)
def _own_frame_evaluation():
    """Dynamo, once it has failed in one test, would make calls hold their arguments longer in all others."""
    yield
    evaluate_frames_by_default()


@pytest.fixture
def fresh_dynamo():
    """No test's graphs are another's."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Leave plans nothing to choose but techniques with these names, and what a test registers."""

    def leave(*names: str) -> None:
        installed = registry._installed()
        left = {name: technique for name, technique in installed.items() if name in names}
        monkeypatch.setattr(registry, "_installed", lambda: left)
        monkeypatch.setattr("lowtide.planning.graph_candidates.capture_and_compare", _no_capture)

    return leave


def _no_capture(*_: object) -> None:
    raise TraceError("Nothing is captured here")


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    """Test steps are so small that a second thread only waits, and on a busy machine for long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
