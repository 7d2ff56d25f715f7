"""The loss alone as a graph, and losses whose gradients are not those of their ops."""

import pytest
import torch
from torch import nn

from lowtide import Workload
from lowtide.errors import TraceError
from lowtide.tracing.capture.forward import capture_forward
from lowtide.tracing.capture.loss import capture_loss, sharing_captures
from tests.models import squares


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def test_inputs_of_a_captured_loss_have_origins():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    captured = capture_forward(Workload(model, squares, torch.randn(8, 4)))
    assert sorted(captured.origins.values()) == ["batch", *["kept"] * 3, *["parameter"] * 4]
    assert captured.loss.meta["val"].shape == ()
    assert int(model[1].num_batches_tracked) == 0


def test_a_shared_capture_has_the_same_ops():
    work = Workload(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), squares, torch.randn(8, 4))
    alone = capture_forward(work)
    with sharing_captures(work):
        work.captures.losses.append(capture_loss(work))
        shared = capture_forward(work)
    assert [node.target for node in shared.nodes[6:]] == [node.target for node in alone.nodes[6:]]
    assert [(node.op, node.meta["val"].shape) for node in shared.nodes[:6]] == [
        (node.op, node.meta["val"].shape) for node in alone.nodes[:6]
    ]


def hooked(m, x):
    y = m(x)
    y.register_hook(lambda gradient: 2 * gradient)
    return y.mean()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo does
@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("loss", [lambda m, x: Double.apply(m(x)).mean(), hooked])
def test_a_loss_with_gradients_of_its_own_is_refused(loss, is_shared):
    work = Workload(nn.Linear(4, 4), loss, torch.randn(8, 4))
    with sharing_captures(work):
        if is_shared:
            work.captures.losses.append(capture_loss(work))
        with pytest.raises(TraceError, match="backward pass of its own"):
            capture_forward(work)


def test_a_loss_that_looks_at_values_is_refused():
    with pytest.raises(TraceError, match="one graph"):
        capture_forward(
            Workload(nn.Linear(4, 4), lambda m, x: m(x).mean() if x.sum() > 0 else m(x).sum(), torch.randn(8, 4))
        )
