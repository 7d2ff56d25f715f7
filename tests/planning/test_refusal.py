"""The error for a budget that no plan fits."""

import re

import pytest
import torch
from torch import nn

from lowtide.engines import eager as eager_module
from lowtide.engines import plan
from lowtide.errors import BudgetError
from lowtide.planning import graph_candidates
from lowtide.planning import search as search_module
from lowtide.workload import Workload

from ..engines.counting import count_calls


def layers() -> Workload:
    """A stack whose activations weigh more than its parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(4)))
    optimizer = torch.optim.Adam(model.parameters())
    return Workload(model, lambda model, x: model(x).square().mean(), torch.randn(256, 16), optimizer)


def refusal(work: Workload, budget: str) -> str:
    with pytest.raises(BudgetError) as error:
        plan(work, budget, tune=False)
    return str(error.value)


def test_a_refusal_traces_few_options_and_names_who_holds_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = count_calls(monkeypatch, eager_module, "predict")
    lines = refusal(layers(), "14%").splitlines()
    assert len(lines) <= 3
    assert all(word in lines[1] for word in ("parameters", "gradients", "optimizer state"))
    assert len(traced) <= 2 * search_module._TRACED


def test_a_refusal_below_parameters_and_gradients_captures_nothing_and_its_budget_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    captures = count_calls(monkeypatch, graph_candidates, "capture_and_compare")
    work = layers()
    named = re.search(r"\(at most .*, (\d+) bytes\)", refusal(work, "1%"))
    assert named
    assert not captures
    assert plan(work, int(named[1]), tune=False).peak_bytes <= int(named[1])


def test_tips_of_torch_over_many_lines_are_not_part_of_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object, **__: object) -> None:
        raise RuntimeError("a different number of tensors was saved\nTip 1\nTip 2")

    monkeypatch.setattr(eager_module, "predict", failing)
    with pytest.raises(BudgetError) as error:
        plan(layers(), "80%", engine="eager", tune=False)
    assert "tensors was saved" in str(error.value)
    assert "Tip" not in str(error.value)
