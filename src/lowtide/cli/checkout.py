"""The benchmarks of a source checkout: list them with their questions, and run one."""

from __future__ import annotations

import ast
import csv
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from lowtide.errors import LowtideError, unknown_name

ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class Benchmark:
    """A file ``benchmarks/bench_<name>.py``, and the question that it answers."""

    name: str
    question: str

    @property
    def results(self) -> Path:
        return ROOT / "benchmarks" / "results" / f"{self.name}.csv"

    def rows(self) -> list[dict[str, str]]:
        """Its rows so far, oldest first."""
        if not self.results.exists():
            return []
        with self.results.open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))

    def run(self, *, quiet: bool = False) -> int:
        """Run it in its own interpreter, from the source tree; what it prints goes to stderr if quiet."""
        path = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
        return subprocess.run(
            [sys.executable, "-m", f"benchmarks.bench_{self.name}"],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))},
            stdout=2 if quiet else None,  # by number: sys.stderr may be no file
            check=False,
        ).returncode


def benchmarks() -> list[Benchmark]:
    """The benchmarks, by name; an installed lowtide has none, and says where they are."""
    folder = ROOT / "benchmarks"
    if not (folder / "harness.py").exists():
        raise LowtideError(
            "The benchmarks are in lowtide's source checkout, and this lowtide is an installed one",
            where=str(Path(__file__).parents[1]),
            hint="Clone the repository and run lowtide bench there.",
        )
    return [Benchmark(path.stem.removeprefix("bench_"), _question(path)) for path in sorted(folder.glob("bench_*.py"))]


def choose(known: list[Benchmark], names: list[str]) -> list[Benchmark]:
    """The benchmarks of these names, in this order."""
    by_name = {benchmark.name: benchmark for benchmark in known}
    for name in names:
        if name not in by_name:
            raise unknown_name("benchmark", name, by_name)
    return [by_name[name] for name in names]


def _question(path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    return (docstring or "").partition("\n")[0]
