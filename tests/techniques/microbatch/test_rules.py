"""Rules for single ops, seen through losses of single layers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lowtide import Workload
from lowtide.techniques.microbatch.proof import prove
from tests.techniques.microbatch.steps import images, proof


@pytest.mark.parametrize(
    ("layer", "is_proved"),
    [
        (nn.BatchNorm1d(4), False),
        (nn.BatchNorm1d(4).eval(), True),
        (nn.LayerNorm(4), True),
        (nn.GroupNorm(2, 4), True),
        (nn.Dropout(0.5), True),
        (nn.Sequential(nn.Unflatten(1, (2, 2)), nn.InstanceNorm1d(2, affine=True)), True),
        (nn.Sequential(nn.Unflatten(1, (2, 2)), nn.Conv1d(2, 3, 1), nn.AdaptiveAvgPool1d(1)), True),
        (nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), False),  # a batch without a time dimension is one text
    ],
)
def test_layers_are_followed_by_what_they_do(layer: nn.Module, is_proved: bool) -> None:
    found = proof(lambda m, b: m(b[0]).square().mean(), images(), layer)
    assert found.reduction == ("mean" if is_proved else None), found


def test_gradients_scaled_by_frequency_are_not_proved() -> None:
    model = nn.Sequential(nn.Embedding(20, 8, scale_grad_by_freq=True), nn.Linear(8, 1))
    work = Workload(model, lambda model, x: model(x).square().mean(), torch.arange(16).view(8, 2))
    assert prove(work).reduction is None
