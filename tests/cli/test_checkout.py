"""The benchmarks of a source checkout, from the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from lowtide.cli import checkout

from .running import lowtide


def test_benchmarks_are_listed_with_their_questions() -> None:
    listed = {entry["name"]: entry["question"] for entry in lowtide("bench", "--json").json()}
    assert listed["import"].endswith(".")
    assert "?" in listed["import"]
    assert all(name in lowtide("bench").out for name in listed)


def test_a_benchmark_runs_in_the_checkout_and_its_new_rows_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "benchmarks"
    (folder / "results").mkdir(parents=True)
    (folder / "harness.py").write_text("")
    (folder / "results/one.csv").write_text("value\n1\n")
    append = "from pathlib import Path\nPath('benchmarks/results/one.csv').open('a').write('2\\n')\n"
    (folder / "bench_one.py").write_text(f'"""Does it run?"""\n{append}')
    (folder / "bench_two.py").write_text('"""Does it fail?"""\nraise SystemExit(1)\n')
    monkeypatch.setattr(checkout, "ROOT", tmp_path)
    assert lowtide("bench", "one", "--json").json() == {"rows": {"one": [{"value": "2"}]}, "failed": []}
    assert lowtide("bench", "--all", code=1).err == "failed: two\n"


def test_an_installed_lowtide_says_where_the_benchmarks_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkout, "ROOT", tmp_path)
    assert "source checkout" in lowtide("bench", code=2).err
