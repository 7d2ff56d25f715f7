"""Batches of other shapes that need no capture: the plain step or checkpoints, within the budget."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from .test_other_shapes import assert_as_plain, on_graph, stack


def test_many_lengths_need_no_capture_beside_the_planned_one(
    captures: list[Any], predictions: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    work = stack()
    step = on_graph(work, "70%")
    torch.manual_seed(1)
    for length in (61, 20, 64, 33, 58, 40, 63, 47, 53):
        assert_as_plain(step, torch.randn(4, length, 8))
    assert len(captures) == 1
    assert len(predictions) <= 9
    lines = [record.getMessage() for record in caplog.records if record.name == "lowtide"]
    assert len(lines) == 2
    assert any("runs as the plain step" in line for line in lines)
    assert any("checkpoints in the model's own code" in line for line in lines)


def test_a_smaller_last_batch_runs_as_the_plain_step_where_that_fits(captures: list[Any]) -> None:
    work = stack()
    step = on_graph(work, "70%")
    assert_as_plain(step, torch.randn(1, 64, 8))
    assert not captures


def test_parameters_trained_later_are_predicted_anew(predictions: list[Any]) -> None:
    work = stack()
    work.model[:1].requires_grad_(False)
    step = on_graph(work, "90%")
    step.loss(torch.randn(4, 20, 8))
    step.loss(torch.randn(4, 20, 8))
    assert len(predictions) == 1
    work.model.requires_grad_(True)
    step.loss(torch.randn(4, 20, 8))
    assert len(predictions) == 2
