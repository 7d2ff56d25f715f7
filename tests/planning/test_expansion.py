"""Combinations that a search looks into: each once, few steps inside, and none that does not run."""

from __future__ import annotations

import pytest
from torch import Tensor, nn

from lowtide import Workload
from lowtide.engines import plan
from lowtide.errors import BudgetError
from lowtide.planning import expansion
from lowtide.planning.candidate import Permission
from lowtide.planning.inner_step import InnerStep
from lowtide.planning.search import Search
from lowtide.profiling import profile
from tests.planning.test_inner_step import deep, names, squares
from tests.refusals import refused


def taken_apart(model: nn.Module, x: Tensor) -> Tensor:
    """A loss of the whole batch alone."""
    assert len(x) == 4, "half a batch"
    return squares(model, x)


def test_a_loss_that_cannot_be_split_is_noted_and_planned_otherwise() -> None:
    work = deep()
    whole = Workload(work.model, taken_apart, work.batch, work.optimizer)
    found = plan(whole, "60%", engine="eager", allow="microbatch", tune=False)
    assert "microbatch" not in names(found)
    with refused("below the smallest plan", kind=BudgetError):
        plan(whole, "25%", engine="eager", allow="microbatch", tune=False)


def test_one_step_inside_is_entered_at_a_time_and_few_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[InnerStep] = []
    monkeypatch.setattr(expansion, "_MOST_INNER_STEPS", 2)
    make = InnerStep.__init__
    monkeypatch.setattr(InnerStep, "__init__", lambda self, *args: (entered.append(self), make(self, *args))[1])
    work, everything = deep(), Permission.of("changed")
    search = Search(work, profile(work), "eager", 1, everything)
    for count in (1, 2, 2):
        search._expand(everything)
        assert len(entered) == count
    assert not search._expand(everything)
