"""The documentation: its code runs, and it leaves no field of the JSON out."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from benchmarks.harness import fill
from torch import nn
from typer.testing import CliRunner

import lowtide
from lowtide import zoo
from lowtide.cli.commands import app
from lowtide.integrations import torch_compile
from lowtide.profiling.profile import Outside
from tests.soak import SOAK

ROOT = Path(__file__).resolve().parents[1]
JSON_PAGE = ROOT / "docs" / "json.md"


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the HTML comment right above it, its text and the line it starts at."""

    language: str
    note: str
    text: str
    line: int


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    for deep, shallow in () if SOAK else SHALLOWER.items():
        text = text.replace(deep, shallow)
    fences = re.finditer(r"^(?:<!-- ([^\n]+) -->\n)?```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [Block(m[2], m[1] or "", m[3], text[: m.start(3)].count("\n") + 1) for m in fences]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty current folder with the examples in it, from which Python can import."""
    (tmp_path / "examples").mkdir()
    for example in (ROOT / "examples").glob("*.py"):
        shutil.copy(example, tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def backend() -> None:
    """Register lowtide for ``torch.compile``, which an installed package is by its entry point."""
    if "lowtide" not in torch._dynamo.list_backends():
        torch._dynamo.register_backend(torch_compile.backend, name="lowtide")


# Depths and budgets of pages. ``make soak`` runs pages as they are; a shallower model runs the same code.
SHALLOWER = {
    "range(12)": "range(2)",
    "depth: int = 8": "depth: int = 2",
    "--budget 60% --steps": "--budget 80% --engine graph --steps",
    "60%": "80%",
    'depth=2), limit="2MB"': 'depth=1), limit="0.7MB"',
    "num_layers=6": "num_layers=2",
    "torch.randn(32, 32, 64)": "torch.randn(8, 32, 64)",
    "zoo:gpt2 --device": "zoo:gpt2 --arg layers=2 --device",
}
TECHNIQUES = sorted(f"docs/techniques/{page.name}" for page in (ROOT / "docs" / "techniques").glob("*.md"))


@pytest.mark.parametrize("name", ["README.md", "docs/tutorial.md", "docs/engines.md", *TECHNIQUES])
@pytest.mark.usefixtures("backend")
def test_the_code_of_a_page_runs_from_top_to_bottom(name: str, folder: Path) -> None:
    page = ROOT / name
    scope: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(page):
        if block.note.startswith("no-test:"):
            continue
        if block.note.startswith("file:"):
            (folder / block.note.removeprefix("file:").strip()).write_text(block.text)
        elif block.language == "python":
            # As many newlines as there are lines above, so that a traceback names the page's own line.
            exec(compile("\n" * (block.line - 1) + block.text, str(page), "exec"), scope)
        elif block.language == "console":
            for command in re.findall(r"^\$ lowtide (.+(?:\\\n.+)*)", block.text, re.MULTILINE):
                run_command(command.replace("\\\n", " "), where=f"{name}:{block.line}")


@pytest.mark.parametrize("name", TECHNIQUES)
def test_a_page_names_the_command_of_each_of_its_tables(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    benchmarks = {path.stem.removeprefix("bench_") for path in (ROOT / "benchmarks").glob("bench_*.py")}
    for table in re.findall(r"^<!-- table: (\w+) -->$", text, re.MULTILINE):
        maker = table if table in benchmarks else table.rpartition("_")[0]  # optimizer_peaks is made by optimizer
        assert maker in benchmarks
        assert f"`lowtide bench {maker}`" in text


def test_tables_say_what_the_committed_rows_say() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        text = page.read_text(encoding="utf-8")
        assert fill(text) == text, f"{page}: python -m benchmarks.harness tables"


def run_command(command: str, *, where: str) -> None:
    result = CliRunner().invoke(app, shlex.split(command))
    assert result.exit_code == 0, f"{where}: lowtide {command}\n{result.output}"


# -- docs/json.md -------------------------------------------------------------------------------------


def section(title: str) -> str:
    """The text below a heading of docs/json.md, up to the next one of its level."""
    match = re.search(rf"^## {title}$\n(.*?)(?=^## |\Z)", JSON_PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert match, f"docs/json.md has no section {title!r}"
    return match[1]


def keys(data: Any, *, free: set[str]) -> set[str]:
    """The keys of all objects inside; those inside a ``free`` key are the user's own, such as axes."""
    if isinstance(data, list | tuple):
        return {key for item in data for key in keys(item, free=free)}
    if not isinstance(data, dict):
        return set()
    return set(data) | {k for key, value in data.items() if key not in free for k in keys(value, free=free)}


def undocumented(title: str, data: Any, *, free: set[str] | None = None) -> list[str]:
    text = section(title)
    return sorted(key for key in keys(data, free=free or set()) if f"`{key}`" not in text)


def test_every_field_of_a_profile_is_documented() -> None:
    data = lowtide.profile(zoo.small("lenet")).to_json()
    outside = [field.name for field in fields(Outside)]
    assert undocumented("Profile", {**data, "outside": dict.fromkeys(outside)}) == []


def test_every_field_of_a_sweep_is_documented() -> None:
    grid = lowtide.sweep(lambda batch: zoo.small("lenet", batch=batch), batch=[2, 4], limit="1GB")
    assert undocumented("Sweep", grid.to_json(), free={"axes", "point"}) == []


@pytest.mark.parametrize("engine", ["eager", "graph"])
def test_every_field_of_a_plan_and_of_its_verification_is_documented(engine: Literal["eager", "graph"]) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6)))
    work = lowtide.Workload(model, lambda model, x: model(x).square().mean(), torch.randn(256, 64))
    plan = lowtide.plan(work, "80%", engine=engine, tune=False)
    assert plan.engine == engine
    assert plan.choices or plan.program
    assert undocumented("Plan", plan.to_json()) == []
    assert undocumented("Verification", lowtide.verify(work, plan).to_json()) == []
