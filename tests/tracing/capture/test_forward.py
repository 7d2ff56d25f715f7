"""The loss alone as a graph, and losses whose gradients are not those of their ops."""

import pytest
import torch
from torch import nn

from lowtide import Workload
from lowtide.errors import TraceError
from lowtide.tracing.capture.forward import capture_forward
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


@pytest.mark.parametrize(
    "loss", [lambda m, x: Double.apply(m(x)).mean(), lambda m, x: m(x).mean() if x.sum() > 0 else m(x).sum()]
)
def test_a_loss_that_is_not_its_ops_is_refused(loss):
    with pytest.raises(TraceError):
        capture_forward(Workload(nn.Linear(4, 4), loss, torch.randn(8, 4)))
