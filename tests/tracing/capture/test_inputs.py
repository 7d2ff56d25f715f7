"""Inputs of a captured graph are found by their places, whatever tensors stand there now."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from lowtide import Workload
from lowtide.errors import TraceError
from lowtide.tracing.capture.inputs import GraphInputs


def test_parameters_and_the_batch_are_found_where_they_stand() -> None:
    model, other = nn.Linear(2, 2), torch.ones(3)
    batch = {"x": torch.zeros(1, 2)}
    work = Workload(model, lambda m, b: m(b["x"]).sum(), batch)
    inputs = GraphInputs(work, [model.bias, batch["x"], other, 7])
    model.bias = nn.Parameter(torch.full((2,), 5.0))
    now = {"x": torch.ones(1, 2)}
    found = inputs(now)
    assert found[0] is model.bias
    assert found[1] is now["x"]
    assert found[2] is other
    assert found[3] == 7


def test_no_tensor_is_held_alive() -> None:
    work = Workload(nn.Linear(2, 2), lambda m, x: m(x).sum(), torch.zeros(1, 2))
    inputs = GraphInputs(work, [work.model.weight, torch.ones(3)])
    with pytest.raises(TraceError):
        inputs(work.batch)
    of_model = GraphInputs(work, [work.model.weight])
    batch = work.batch
    del work
    gc.collect()
    with pytest.raises(TraceError):
        of_model(batch)
