"""Rules for single ops, seen through losses of single layers."""

from __future__ import annotations

import torch
from torch import nn

from lowtide import Workload
from lowtide.techniques.microbatch.proof import prove
from tests.techniques.microbatch.steps import images, proofs

MIXING = [
    nn.BatchNorm1d(4),
    nn.TransformerEncoderLayer(4, 2, 8, batch_first=True),  # a batch without a time dimension is one text
]
PROVED = [
    nn.BatchNorm1d(4).eval(),
    nn.LayerNorm(4),
    nn.GroupNorm(2, 4),
    nn.Dropout(0.5),
    nn.Sequential(nn.Unflatten(1, (2, 2)), nn.InstanceNorm1d(2, affine=True)),
    nn.Sequential(nn.Unflatten(1, (2, 2)), nn.Conv1d(2, 3, 1), nn.AdaptiveAvgPool1d(1)),
]


def test_layers_are_followed_by_what_they_do() -> None:
    layers = [*MIXING, *PROVED]
    losses = {str(i): lambda m, b, i=i: m[1 + i](m[0](b[0])).square().mean() for i in range(len(layers))}
    reductions = [each.reduction for _, each in sorted(proofs(losses, images(), *layers).items())]
    assert reductions == [None] * len(MIXING) + ["mean"] * len(PROVED)


def test_gradients_scaled_by_frequency_are_not_proved() -> None:
    model = nn.Sequential(nn.Embedding(20, 8, scale_grad_by_freq=True), nn.Linear(8, 1))
    work = Workload(model, lambda model, x: model(x).square().mean(), torch.arange(16).view(8, 2))
    assert prove(work).reduction is None
