"""Blocks of a model: numbered modules that run enough ops."""

from __future__ import annotations

import torch
from torch import nn

from lowtide import Workload
from lowtide.tracing.capture.blocks import blocks_of
from lowtide.tracing.capture.loss import capture_joint
from tests.models import InTurn, squares


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for linear in self.inner:
            x = torch.tanh(linear(x).sin().cos())
        return x


def test_a_block_is_the_innermost_numbered_module_with_enough_ops() -> None:
    joint = capture_joint(Workload(InTurn(Part(), Part()), squares, torch.randn(2, 4)))
    block_of = blocks_of(joint)
    paths = [block_of(node) for node in joint.forward]
    named = list(dict.fromkeys(path for path in paths if path))
    assert [path[-1] for path in named] == ["0", "1"]
    assert not any("inner" in path for path in named)
    assert paths[-1] == ""  # of the loss
    assert {block_of(node) for node in joint.backward} == {*named, ""}
