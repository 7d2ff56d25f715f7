"""Profiles, plans and their verification restore what models keep from step to step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import lowtide
from lowtide.engines import plan

from .keeping import MODELS, SHAPE, Model, squares, workload


class Average(Model):
    """Moved in place, and no buffer; and a tensor that is trained though it is no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = torch.zeros(*SHAPE)
        self.token = torch.randn(*SHAPE, requires_grad=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(x + self.token)
        with torch.no_grad():
            self.kept.mul_(0.9).add_(x.detach(), alpha=0.1)
        return x + self.kept


@pytest.mark.parametrize("engine", ["graph", "eager"])
def test_tensors_that_are_written_to_are_restored(engine: Any) -> None:
    model = Average()
    work = workload(model)
    found = plan(work, "75%", engine=engine, allow="bitwise", tune=False)
    checked = lowtide.verify(work, found)
    assert checked.results_agree, str(checked)
    assert not model.kept.any()
    assert model.token.grad is None


@pytest.mark.parametrize("model", MODELS)
def test_no_fake_tensors_are_left_behind(model: type[Model]) -> None:
    work = workload(model())
    lowtide.profile(work, fake=True)
    plan(work, "85%", allow="bitwise", engine="eager", tune=False)
    assert type(squares(work.model, work.batch)) is Tensor
    assert type(squares(work.model, work.batch)) is Tensor
