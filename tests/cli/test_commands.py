"""The command line: what it prints, what it writes, and what it says to wrong input."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from lowtide.planning import Plan
from lowtide.profiling import profile
from lowtide.zoo import workload

from .running import lowtide


def test_a_profile_is_shown_and_json_is_nothing_else(deep: str) -> None:
    shown = lowtide("profile", deep, "--batch", "64").out
    assert "allocated peak" in shown
    assert "activation" in shown
    profiled = lowtide("profile", deep, "--arg", "depth=3", "--json")
    assert profiled.json()["peak_bytes"] > 0
    assert profiled.json()["name"] == deep
    assert "building" in profiled.err  # output of the user's code is kept, elsewhere


def test_a_prediction_on_the_command_line_is_the_librarys() -> None:
    predicted = lowtide("profile", "zoo:lenet", "--device", "h200", "--batch", "8", "--json").json()
    wanted = profile(workload("lenet", batch=8, device="meta"), device="h200")
    assert predicted["peak_bytes"] == wanted.peak_bytes
    assert (predicted["device"], predicted["fake"]) == ("h200", True)


def test_a_report_and_figures_are_written(deep: str, tmp_path: Path) -> None:
    lowtide("profile", deep, "--arg", "depth=2", "--fake", "--html", "new/report.html", "--figures", "new/figures")
    assert "<html" in (tmp_path / "new/report.html").read_text()
    names = {path.name for path in (tmp_path / "new/figures").iterdir()}
    assert names == {f"{n}.{s}" for n in ("timeline", "pie", "modules") for s in ("png", "svg")}


def test_a_sweep_is_a_grid_with_what_fits_marked(deep: str) -> None:
    grid = ("profile", deep, "--sweep", "batch=64,4096", "--sweep", "depth=2,4", "--limit", "1MB")
    assert "4096" in lowtide(*grid).out
    cells = lowtide(*grid, "--json").json()["cells"]
    assert [cell["point"] for cell in cells] == [{"batch": b, "depth": d} for b in (64, 4096) for d in (2, 4)]
    assert [cell["fits"] for cell in cells] == [True, True, False, False]


def test_the_largest_batch_fits_and_one_more_does_not(deep: str) -> None:
    step = ("profile", deep, "--arg", "depth=2")
    largest = lowtide(*step, "--max-batch", "--limit", "90KB", "--json").json()
    assert largest["limit_bytes"] == 90_000
    batches = [largest["max_batch"], largest["max_batch"] + 1]
    peaks = [lowtide(*step, "--batch", str(b), "--fake", "--json").json()["peak_bytes"] for b in batches]
    assert peaks[0] <= 90_000 < peaks[1]


def test_a_plan_is_written_verified_and_trained_with(deep: str, tmp_path: Path) -> None:
    planned = lowtide("plan", deep, "--budget", "60%", "--out", "plans/plan.json", "--html", "plan.html", "--json")
    written = tmp_path / "plans/plan.json"
    plan = Plan.from_json(written.read_text())
    assert plan.to_json() == planned.json()
    assert plan.peak_bytes <= plan.budget_bytes
    assert "<html" in (tmp_path / "plan.html").read_text()

    verified = lowtide("verify", deep, "plans/plan.json", "--json").json()
    assert verified["ok"]
    assert verified["storage_peak_bytes"] == plan.storage_peak_bytes
    written.write_text(json.dumps({**planned.json(), "budget_bytes": 1000}))  # a broken promise is exit code 1
    assert lowtide("verify", deep, "plans/plan.json", "--json", code=1).json()["within_budget"] is False

    trained = lowtide("train", deep, "--budget", "60%", "--steps", "3", "--json").json()
    assert len(trained["losses"]) == 3
    assert trained["losses"][2] < trained["losses"][0]
    assert trained["peak_bytes"] <= trained["plan"]["budget_bytes"]


def test_a_plan_on_the_graph_engine_has_a_program_and_a_page(deep: str, tmp_path: Path) -> None:
    files = ("--out", "plan.json", "--program", "new/program.txt", "--html", "plan.html")
    planned = lowtide("plan", deep, "--budget", "60%", "--engine", "graph", *files, "--json").json()
    assert planned["engine"] == "graph"
    assert planned["program"]["solver"] in ("chain", "graph")
    assert planned["program"]["lowering"] == "ops"
    text = (tmp_path / "new/program.txt").read_text()
    assert text.count("recompute ") == planned["program"]["ops_again"] > 0
    assert "go to backward" in text
    page = (tmp_path / "plan.html").read_text()
    assert "A row is a value, a bar one of its lifetimes" in page
    assert page.count("recomputed") > 2
    assert lowtide("verify", deep, "plan.json", "--json").json()["ok"]

    # A peak over the budget would be exit code 1.
    shown = lowtide("train", deep, "--budget", "60%", "--steps", "3", "--engine", "graph").out
    assert shown.index("planned step") < shown.index("3 steps, ") < shown.index("measured peak")
    assert re.search(r"3 steps, [\d.]+ m?s a step, [\d.]+ m?s the first: loss", shown)


def test_an_eager_plan_has_no_program_and_is_timed_where_it_can_run(deep: str) -> None:
    arguments = ("plan", deep, "--budget", "60%", "--engine", "eager", "--json")
    here, predicted = (lowtide(*arguments, *more).json() for more in ((), ("--fake",)))
    assert (here["engine"], here["program"]) == ("eager", None)
    assert ["Timed before choosing" in " ".join(each["notes"]) for each in (here, predicted)] == [True, False]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("profile nothing.py:f", ("no file nothing.py",)),
        ("profile deep.py:wrok", ("no function 'wrok'", "workload")),
        ("profile deep.py:workload --arg depth", ("--arg 'depth' is not a pair", "key=value")),
        ("profile deep.py:workload --device h300", ("h300", "h200")),
        ("profile deep.py:workload --limit 1GB", ("--limit", "--sweep")),
        ("profile deep.py:workload --max-batch", ("--max-batch --limit 16GB",)),
        ("profile deep.py:workload --sweep batch=a,b", ("batch=8,16,32",)),
        ("profile deep.py:workload --sweep batch=8 --limit lots", ("Not a size: 'lots'",)),
        ("profile deep.py:workload --autocast fp4", ("fp4", "bf16")),
        ("profile deep.py:workload --html report.pdf", ("'report.pdf'", ".html")),
        ("plan deep.py:workload --budget 1KB --engine eager", ("below the smallest plan",)),
        ("plan deep.py:workload --budget much", ("Not a size: 'much'",)),
        ("plan deep.py:workload --budget 60% --engine eager --program p.txt", ("eager engine", "--engine graph")),
        ("plan deep.py:workload --budget 1GB --engine graph --program p.txt", ("plain step fits", "smaller budget")),
        ("plan deep.py:workload --budget 60% --engine graph --fake", ("no plan on the graph engine",)),
        ("plan deep.py:workload --budget 60% --allow anything", ("anything", "approximate")),
        ("plan deep.py:workload --budget 60% --forbid anything", ("anything", "sqrt")),
        ("train deep.py:workload --budget 60% --device h200", ("cannot run on 'h200'", "cpu or cuda")),
        ("train deep.py:workload --budget 60% --arg optimizer=no", ("no optimizer",)),
        ("verify deep.py:workload none.json", ("no file none.json", "--out none.json")),
        ("verify deep.py:workload deep.py", ("not JSON",)),
        ("verify deep.py:workload binary.json", ("binary.json is not a plan", "--out binary.json")),
        ("bench no-such", ("no benchmark 'no-such'",)),
    ],
)
def test_wrong_input_is_answered_in_one_paragraph(
    deep: str, tmp_path: Path, arguments: str, words: tuple[str, ...]
) -> None:
    (tmp_path / "binary.json").write_bytes(b"\x80\x02}q\x00.")
    answer = lowtide(*arguments.split(), code=2)
    assert answer.err.startswith("error: ")
    assert answer.err.count("\n") == 1
    assert "Traceback" not in answer.err
    for word in words:
        assert word in answer.err


FAILING = """
import torch
from lowtide import Workload

def loss(model, x):
    y = model(x)
    return torch.nn.functional.cross_entropy(y, x)  # shapes that do not fit

def workload():
    return Workload(torch.nn.Linear(4, 3), loss, torch.ones(2, 4))
"""


def test_an_error_in_the_users_loss_names_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "failing.py").write_text(FAILING)
    for command in ("profile failing.py:workload", "profile failing.py:workload --fake"):
        assert "failing.py:7)" in lowtide(*command.split(), code=2).err
