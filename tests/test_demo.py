"""The demo keeps its promises, and says so when it does not."""

from __future__ import annotations

import io
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from lowtide import demo
from lowtide.errors import MissingExtra
from lowtide.sizes import format_size
from tests.refusals import refused
from tests.soak import SOAK


def test_the_demo_trains_equally_within_three_budgets_and_writes_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not SOAK:  # a shallow network, which cannot do with as little
        monkeypatch.setattr(demo, "DEPTH", 10)
        monkeypatch.setattr(demo, "BUDGETS", ("95%", "85%", "75%"))
    shown = io.StringIO()
    outcome = demo.run(tmp_path / "out", Console(file=shown, width=80), steps=3)
    assert outcome.ok
    plain, *planned = outcome.runs
    assert [run.name for run in planned] == list(demo.BUDGETS)
    assert plain.losses[0] > plain.losses[2]
    budgets = [run.budget_bytes for run in planned]
    assert [plain.peak_bytes, *budgets] == sorted([plain.peak_bytes, *budgets], reverse=True)
    for run in planned:
        assert run.losses == plain.losses
        assert run.accuracy == plain.accuracy
        assert run.peak_bytes == run.predicted_bytes <= run.budget_bytes
        assert format_size(run.budget_bytes) in shown.getvalue()
    page = (tmp_path / "out/report.html").read_text()
    assert page.count(">budget ") >= len(planned)  # the labels of the dashed lines
    assert str(tmp_path / "out/report.html") in shown.getvalue()
    assert "equal bit for bit" in shown.getvalue()
    assert "…" not in shown.getvalue().partition("4. The result")[2]  # the table fits a narrow terminal

    for broken in (replace(planned[0], equal=False), replace(planned[0], budget_bytes=1)):
        wrong = replace(outcome, runs=[plain, broken, *planned[1:]])
        assert not wrong.ok
        demo._show(wrong, Console(file=shown, width=120))
    assert "NOT EQUAL" in shown.getvalue()
    assert "OVER THE BUDGET" in shown.getvalue()


def test_the_digits_are_all_used_once_and_the_test_set_is_apart() -> None:
    batches, (images, targets) = demo.load_digits_as_batches()
    assert images.shape == (demo.TEST_IMAGES, 1, demo.IMAGE, demo.IMAGE)
    assert len(batches) == (1797 - demo.TEST_IMAGES) // demo.BATCH
    assert all(x.shape[0] == y.shape[0] == demo.BATCH for x, y in batches)
    assert 0 <= float(images.min()) <= float(images.max()) == 1.0
    trained_on = torch.cat([x for x, _ in batches]).flatten(1)
    assert torch.cdist(images.flatten(1), trained_on).min() > 0
    assert set(targets.tolist()) == set(range(10))


def test_without_scikit_learn_the_demo_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with refused("lowtide[demo]", kind=MissingExtra):
        demo.load_digits_as_batches()
