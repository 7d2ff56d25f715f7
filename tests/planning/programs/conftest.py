"""Programs that tests share: GPT-2's smallest, and three of a small model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lowtide import Workload, zoo
from lowtide.engines import graph
from lowtide.planning.programs.program import Program
from lowtide.planning.programs.strategies import plain, sqrt_without_cheap
from lowtide.tracing.capture.loss import capture_joint
from tests.models import squares

from ...engines.counting import Planner
from ..held import coding, offloading


@pytest.fixture(scope="package")
def smallest() -> Planner:
    """A captured GPT-2 with its program."""
    planner = Planner("smallest")
    work = zoo.small("gpt2")
    graph.planned_loss(work, planner)(work.batch)
    return planner


@pytest.fixture(scope="package")
def programs() -> list[Program]:
    """A program that keeps everything, one that recomputes, one that offloads, and one that takes codes."""
    layers = [layer for _ in range(6) for layer in (nn.Linear(16, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Dropout(0.1))]
    joint = capture_joint(Workload(nn.Sequential(*layers), squares, torch.randn(32, 16)))
    activated = capture_joint(Workload(nn.Sequential(*layers[::2]), squares, torch.randn(32, 16)))
    whole = plain(joint)
    return [whole, sqrt_without_cheap(joint), offloading(joint), coding(activated)]
