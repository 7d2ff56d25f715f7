"""Launches are shown to who watches, and only to them."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lowtide.kernels import launches
from lowtide.kernels.reference.batchnorm import Running
from lowtide.kernels.reference.chunked_loss import Rules
from lowtide.kernels.reference.randomized import Sketch
from lowtide.tracing.tracer import _launch

pytest.importorskip("triton")
from lowtide.kernels.triton import batchnorm as kernels
from lowtide.kernels.triton import chunked_loss, randomized


def test_a_watcher_may_leave_a_launch_out():
    seen = []
    with launches.watched(lambda name, tensors, launch: seen.append((name, tensors[0].shape))), FakeTensorMode():
        mean, _ = kernels.measure(torch.ones(4, 3, 5, 5), Running(), eps=1e-5)
    assert mean.shape == (3,)
    assert seen == [("measure", (4, 3, 5, 5))]
    assert launches.watcher is None


def test_launches_of_the_loss_and_of_sketches_are_shown_by_name():
    seen = []
    with launches.watched(lambda name, tensors, launch: seen.append((name, tuple(tensors[0].shape)))), FakeTensorMode():
        target = torch.zeros(6, dtype=torch.long)
        chunked_loss.rows_(torch.ones(6, 100), target, torch.empty(6), Rules(), torch.tensor(1.0))
        for kind in ("rademacher", "rows"):
            assert randomized.project(torch.ones(50, 4), torch.tensor(1), Sketch(kind, 0.2)).shape == (10, 4)
    assert seen == [("chunked_loss_rows", (6, 100)), ("project_rows", (50, 4)), ("sample_rows", (50, 4))]


def test_what_a_watcher_launches_is_not_shown_again():
    count = 0

    def watch(name, tensors, launch):
        nonlocal count
        count += 1
        launch()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(4, 3, 5, 5, device=device)
    with launches.watched(watch):
        mean, _ = kernels.measure(x, Running(), eps=1e-5)
    assert count == 1
    torch.testing.assert_close(mean, x.mean((0, 2, 3)))


def test_a_fake_trace_leaves_real_launches_of_others_alone():
    launched = []
    _launch(None, "measure", [torch.ones(2)], lambda: launched.append(True), fake=True)
    assert launched
