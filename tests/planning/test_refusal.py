"""The error for a budget that no plan fits."""

import re

import pytest
import torch
from torch import nn

from lowtide.engines import plan
from lowtide.errors import BudgetError
from lowtide.planning import graph_candidates, prediction
from lowtide.planning import search as search_module
from lowtide.workload import Workload


def layers(width: int = 16, samples: int = 256) -> Workload:
    """A stack whose activations weigh more than its parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(6)))
    optimizer = torch.optim.Adam(model.parameters())
    return Workload(model, lambda model, x: model(x).square().mean(), torch.randn(samples, width), optimizer)


def refusal(work: Workload, budget: str) -> str:
    with pytest.raises(BudgetError) as error:
        plan(work, budget, tune=False)
    return str(error.value)


def test_a_refusal_has_three_lines_and_names_who_holds_the_bytes() -> None:
    lines = refusal(layers(), "12%").splitlines()
    assert len(lines) <= 3
    assert all(word in lines[1] for word in ("parameters", "gradients", "optimizer state"))


def test_a_refusal_below_parameters_and_gradients_captures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def capture(*_: object) -> None:
        raise AssertionError("captured a graph that cannot help")

    monkeypatch.setattr(graph_candidates, "capture_and_compare", capture)
    work = layers(width=256, samples=16)
    assert "(at most " in refusal(work, "20%")


def test_the_budget_that_a_refusal_names_works() -> None:
    for budget in ("1%", "15%"):
        work = layers()
        found = re.search(r", (\d+) bytes\)", refusal(work, budget))
        assert found
        assert plan(work, int(found[1]), tune=False).peak_bytes <= int(found[1])


def test_a_refusal_traces_few_options(monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[object] = []
    real = prediction.predict

    def counting(work, options, baseline, **how):
        traced.append(options)
        return real(work, options, baseline, **how)

    monkeypatch.setattr(search_module, "predict", counting)
    refusal(layers(), "12%")
    assert len(traced) <= 2 * search_module._TRACED


def test_tips_of_torch_over_many_lines_are_not_part_of_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object, **__: object) -> None:
        raise RuntimeError("a different number of tensors was saved\nTip 1\nTip 2")

    monkeypatch.setattr(search_module, "predict", failing)
    with pytest.raises(BudgetError, match="a different number of tensors was saved") as error:
        plan(layers(), "80%", engine="eager", tune=False)
    assert "Tip" not in str(error.value)
