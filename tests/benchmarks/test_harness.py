"""The benchmark harness: nothing is timed that was not checked, and tables say what the rows say."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from tests.refusals import refused

from benchmarks import harness

ROOT = Path(__file__).resolve().parents[2]


def test_nothing_is_timed_where_the_answers_differ() -> None:
    calls: list[str] = []

    def check() -> None:
        raise AssertionError("the answers differ")

    with refused("the answers differ", kind=AssertionError):
        harness.compare("case", {"ours": lambda: calls.append("ran")}, check=check)
    assert calls == []


def test_contenders_take_turns_after_the_check() -> None:
    calls: list[str] = []
    contenders = {"plain": lambda: calls.append("plain"), "ours": lambda: calls.append("ours")}
    rows = harness.compare("case", contenders, check=lambda: calls.append("check"), repeats=3, warmup=1)
    assert calls == ["check"] + ["plain", "ours"] * 4
    assert [(r.subject, r.metric, r.repeats) for r in rows] == [
        ("plain", "time", 3),
        ("plain", "time ratio", 3),
        ("ours", "time", 3),
        ("ours", "time ratio", 3),
    ]
    assert rows[1].value == rows[1].low == rows[1].high == 1.0


@pytest.mark.parametrize("samples", [[2.0], [5.0, 1.0], [3.0, 1.0, 2.0], [4.0, 9.0, 1.0, 7.0, 3.0, 3.0]])
def test_quartiles_are_those_of_torch(samples: list[float]) -> None:
    wanted = torch.quantile(torch.tensor(samples, dtype=torch.float64), torch.tensor([0.25, 0.5, 0.75]).double())
    assert harness.quartiles(samples) == pytest.approx(wanted.tolist())


def test_rows_are_appended_with_hardware_and_versions(tmp_path: Path) -> None:
    row = harness.Row.of("case, with a comma", "ours", "time", [0.01, 0.02, 0.03], "s")
    harness.record("demo", [row], results=tmp_path)
    path = harness.record("demo", [row, row], results=tmp_path)
    entries = harness.read(path)
    assert len(entries) == 3
    assert entries[0]["case"] == "case, with a comma"
    assert (entries[0]["value"], entries[0]["low"], entries[0]["high"]) == ("0.02", "0.015", "0.025")
    assert entries[0]["torch"] == torch.__version__
    assert "cores" in entries[0]["hardware"]
    assert {"date", "python", "cuda", "triton", "lowtide"} <= entries[0].keys()


def test_rows_of_another_shape_are_not_mixed_in(tmp_path: Path) -> None:
    (tmp_path / "demo.csv").write_text("case,seconds\nold,1\n")
    with refused("demo.csv", "case, seconds", kind=ValueError):
        harness.record("demo", [harness.Row.of("c", "s", "time", [1.0], "s")], results=tmp_path)
    assert (tmp_path / "demo.csv").read_text() == "case,seconds\nold,1\n"


def test_a_table_shows_the_latest_row_of_each_key(tmp_path: Path) -> None:
    def record(case: str, subject: str, time: float) -> None:
        harness.record("demo", [harness.Row.of(case, subject, "time", [time], "s")], results=tmp_path)

    record("small", "plain", 1.0)
    record("small", "ours", 0.5)
    record("large", "plain", 3.0)
    record("small", "plain", 2.0)
    harness.record("demo", [harness.Row.of("small", "ours", "peak", [2**20], "B")], results=tmp_path)
    table = harness.table("demo", results=tmp_path)
    assert table.splitlines()[:5] == [
        "|  |  | time | peak |",
        "| --- | --- | ---: | ---: |",
        "| small | plain | 2.00 s |  |",
        "|  | ours | 500 ms | 1.00 MiB |",
        "| large | plain | 3.00 s |  |",
    ]
    assert "benchmarks/results/demo.csv" in table
    assert torch.__version__ in table
    assert harness.table("demo since 2020-01-01", results=tmp_path) == table
    assert harness.table("demo since 2999-01-01", results=tmp_path) == ""


def test_documents_get_their_tables_between_the_markers_and_nothing_else(tmp_path: Path) -> None:
    harness.record("demo", [harness.Row.of("case", "ours", "time", [0.5], "s")], results=tmp_path)
    page = tmp_path / "docs" / "deep" / "page.md"
    page.parent.mkdir(parents=True)
    marker = "<!-- table: demo since 2020-01-01 -->"
    page.write_text(f"# Before\n\n{marker}\nstale\n<!-- end -->\n\nAfter `<!-- table: demo -->`\n")
    (tmp_path / "README.md").write_text("no tables\n")
    assert harness.fill_documents(tmp_path, results=tmp_path) == [page]
    text = page.read_text()
    assert text.startswith(f"# Before\n\n{marker}\n|  |  | time |\n")
    assert text.endswith("<!-- end -->\n\nAfter `<!-- table: demo -->`\n")
    assert "stale" not in text
    assert harness.fill_documents(tmp_path, results=tmp_path) == []


def test_a_marker_without_an_end_or_without_rows_is_an_error(tmp_path: Path) -> None:
    with refused("demo", "<!-- end -->", kind=ValueError):
        harness.fill("<!-- table: demo -->\ntext\n", results=tmp_path)
    with refused("lowtide bench demo", kind=FileNotFoundError):
        harness.fill("<!-- table: demo -->\n<!-- end -->\n", results=tmp_path)


def test_every_benchmark_says_its_question_and_has_a_main() -> None:
    for path in (ROOT / "benchmarks").glob("bench_*.py"):
        tree = ast.parse(path.read_text())
        assert "?" in (ast.get_docstring(tree) or "").splitlines()[0], f"{path.name} asks no question"
        assert any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body), path.name
