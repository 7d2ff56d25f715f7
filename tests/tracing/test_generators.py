"""Generators that a step reads: states that checkpoints keep, and numbers that recomputation would not repeat."""

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from lowtide import Workload
from lowtide.tracing import trace
from lowtide.tracing.generators import has_own_generator
from tests.models import Then
from tests.tracing.layers import mean_loss

OWN = torch.Generator().manual_seed(0)
DRAWS = {
    "Python": random.random,
    "numpy": lambda: float(np.random.rand()),
    "torch": lambda: torch.rand(()),
    "its own": lambda: torch.rand((), generator=OWN),
}


@pytest.mark.parametrize("name", DRAWS)
def test_ops_of_a_module_that_draws_from_another_generator_are_marked(name):
    model = nn.Sequential(nn.Linear(4, 4), Then(lambda x: x.tanh() + DRAWS[name]()), nn.Linear(4, 4))
    graph = trace(Workload(model, mean_loss, torch.randn(3, 4)))
    marked = {op.module for op in graph.ops if op.own_generator}
    assert marked == (set() if name == "torch" else {"1"} if name == "its own" else {"1", "2"})


def test_the_default_generator_is_not_ones_own():
    assert not has_own_generator((1, torch.default_generator), {})
    assert has_own_generator((), {"generator": torch.Generator()})


def test_generator_states_of_checkpoints_are_counted():
    layers = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5))
    work = Workload(layers, lambda m, x: checkpoint(m, x, use_reentrant=False).mean(), torch.randn(8, 64))
    states = [s for s in trace(work).storages if s.label == "generator state"]
    assert {s.bytes for s in states} == {torch.get_rng_state().nbytes}


def test_functional_dropout_streams_are_those_of_a_plain_step():
    model = nn.Linear(16, 16)
    work = Workload(model, lambda model, batch: F.dropout(model(batch), 0.5).sum(), torch.randn(4, 16))
    torch.manual_seed(1)
    plain = work.compute_loss()
    torch.manual_seed(1)
    trace(work)
    assert torch.equal(work.compute_loss(), plain)
