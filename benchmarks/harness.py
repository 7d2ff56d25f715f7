"""How every benchmark here measures: first that the answers agree, then how long they take, side by side.

    rows = compare("resnet50, batch 4", {"plain": plain, "traced": traced}, check=agree)
    record("trace", rows)                       # prints them and appends them to results/trace.csv

Rows are tidy: one figure each, with its quartiles, the date, the hardware and the versions. The tables in
README.md and docs/ are rendered from them, between ``<!-- table: trace -->`` and ``<!-- end -->``:

    PYTHONPATH=src:. python -m benchmarks.harness tables

Needs torch, numpy and scipy alone.
"""

from __future__ import annotations

import argparse
import csv
import gc
import importlib
import importlib.metadata
import os
import platform
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

import torch

from lowtide.sizes import format_seconds, format_size
from lowtide.version import __version__

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


@dataclass(frozen=True)
class Row:
    """One figure: a median and its quartiles, or one exact count with both equal to it."""

    case: str  # what was done: "resnet50, batch 4"
    subject: str  # who did it: "plain step"
    metric: str  # the column of the table: "time", "peak"
    value: float
    low: float
    high: float
    unit: str  # "s", "B", "x" for a ratio, "%", or "" for a count
    repeats: int = 1

    @classmethod
    def of(cls, case: str, subject: str, metric: str, samples: Sequence[float], unit: str) -> Row:
        """The row of some samples."""
        low, middle, high = quartiles(samples)
        return cls(case, subject, metric, middle, low, high, unit, len(samples))

    def __str__(self) -> str:
        """The figure as tables show it.

        >>> str(Row("a", "b", "time", 0.0123, 0.0121, 0.0126, "s", 9))
        '12.3 ms (12.1 ms to 12.6 ms)'
        """
        shown = format_value(self.value, self.unit)
        low, high = format_value(self.low, self.unit), format_value(self.high, self.unit)
        return shown if low == high == shown else f"{shown} ({low} to {high})"


def compare(
    case: str,
    contenders: Mapping[str, Callable[[], object]],
    *,
    check: Callable[[], object],
    repeats: int = 10,
    warmup: int = 2,
    device: str = "cpu",
) -> list[Row]:
    """Time contenders that do the same, in turns, so that a slow moment of the machine hits all of them.

    ``check`` raises where their results do not agree; then nothing is timed. Each ratio row is to the first
    contender, from the same rounds.
    """
    check()
    for _ in range(warmup):
        for run in contenders.values():
            run()
    samples: dict[str, list[float]] = {subject: [] for subject in contenders}
    for _ in range(repeats):
        for subject, run in contenders.items():
            samples[subject].append(seconds(run, device=device))
    first = next(iter(samples.values()))
    rows: list[Row] = []
    for subject, taken in samples.items():
        ratios = [mine / base for mine, base in zip(taken, first, strict=True)]
        rows.append(Row.of(case, subject, "time", taken, "s"))
        rows.append(Row.of(case, subject, "time ratio", ratios, "x"))
    return rows


def seconds(run: Callable[[], object], *, device: str = "cpu") -> float:
    """Seconds of one call: by CUDA events on a GPU, by the clock elsewhere."""
    gc.collect()
    if device != "cuda":
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def quartiles(samples: Sequence[float]) -> tuple[float, float, float]:
    """The quarter, the half and three quarters of the way through the sorted samples.

    >>> quartiles([3.0, 1.0, 2.0, 5.0, 4.0])
    (2.0, 3.0, 4.0)
    """
    if len(samples) == 1:
        return samples[0], samples[0], samples[0]
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return low, middle, high


def skip(reason: str) -> NoReturn:
    """End a benchmark that cannot run here, without failing those after it."""
    print(f"skipped: {reason}")
    raise SystemExit(0)


def torchvision_models() -> Any:
    """Import ``torchvision.models``, or end the benchmark."""
    try:
        return importlib.import_module("torchvision.models")
    except (ImportError, RuntimeError) as error:  # a RuntimeError: it was built for another torch
        skip(f"torchvision: {error}")


def arguments(doc: str | None, *shared: str, **own: dict[str, Any]) -> dict[str, Any]:
    """Read the command line of a benchmark, by the names of its ``main``'s arguments.

    ``shared`` are options that mean the same in all of them. Its ``own`` are as ``add_argument`` takes them, or say
    what is other in a shared one.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, how in {**{name: {} for name in shared}, **own}.items():
        parser.add_argument(f"--{name.replace('_', '-')}", **{**_SHARED.get(name, {}), **how})
    return vars(parser.parse_args())


def default_device() -> str:
    """The GPU if there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def results_of(results: Path | None, *, quick: bool) -> Path:
    """Choose the folder of the rows: a temporary one for a quick try, unless one is given."""
    return results or (Path(tempfile.gettempdir()) / "lowtide-quick" if quick else RESULTS)


def record(name: str, rows: Iterable[Row], *, device: str = "cpu", results: Path = RESULTS) -> Path:
    """Append rows to ``results/<name>.csv`` with the date, the hardware and the versions, and print them."""
    path = results / f"{name}.csv"
    rows = list(rows)
    stamp = environment(device)
    columns = [*(field.name for field in fields(Row)), *stamp]
    results.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError), path.open("x") as file:  # several processes may record at a time
        file.write(",".join(columns) + "\n")
    with path.open(newline="") as file:
        if (there := next(csv.reader(file), [])) != columns:
            raise ValueError(f"{path} has other columns ({', '.join(there)}): move it away first")
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writerows({**asdict(row), **stamp} for row in rows)
    print(f"{render(rows)}\n\nappended to {path}")
    return path


def environment(device: str = "cpu") -> dict[str, str]:
    """Date, hardware and versions, for each row."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": torch.cuda.get_device_name() if device == "cuda" else cpu_name(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda or "",
        "triton": _version("triton"),
        "lowtide": __version__,
    }


def cpu_name() -> str:
    """The processor as its maker calls it, and how many cores of it this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    info = Path("/proc/cpuinfo")
    match = re.search(r"^model name\s*:\s*(.+)$", info.read_text() if info.exists() else "", re.MULTILINE)
    return f"{match[1].strip() if match else platform.machine()}, {cores} cores"


# Tables whose values and ranges are over a few seeds.
SPREADS = dict.fromkeys(
    ("large_batch", "microbatch_quality", "optimizer_quality"), "mean (range) of seeds, median of times"
)


def table(name: str, *, results: Path = RESULTS) -> str:
    """The latest rows of a benchmark as Markdown, and a line on where they come from.

    ``name`` may end in ``since 2026-11-19``, which leaves older rows out.
    """
    name, _, since = name.partition(" since ")
    path = results / f"{name}.csv"
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: run lowtide bench {name} first")
    latest = {(e["hardware"], e["case"], e["subject"], e["metric"]): e for e in read(path) if e["date"] >= since}
    parts: list[str] = []
    for hardware in dict.fromkeys(e["hardware"] for e in latest.values()):
        mine = [e for e in latest.values() if e["hardware"] == hardware]
        last = max(mine, key=lambda e: e["date"])
        versions = f"torch {last['torch']}, lowtide {last['lowtide']}, {last['date'][:10]}"
        spread = SPREADS.get(name, "median (quartiles)")
        where = f"*{hardware}; {versions}; {spread}. Rows: benchmarks/results/{path.name}.*"
        parts.append(f"{render([_row(e) for e in mine])}\n\n{where}")
    return "\n\n".join(parts)


def read(path: Path) -> list[dict[str, str]]:
    """The rows of a file as they stand there, oldest first."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def render(rows: Sequence[Row]) -> str:
    """Rows as a Markdown table: a line for each case and subject, a column for each metric."""
    metrics = list(dict.fromkeys(row.metric for row in rows))
    cells: dict[tuple[str, str], dict[str, str]] = {}
    cases = list(dict.fromkeys(row.case for row in rows))
    for row in sorted(rows, key=lambda row: cases.index(row.case)):  # jobs side by side append in turns
        cells.setdefault((row.case, row.subject), {})[row.metric] = str(row)
    lines = [["", "", *metrics], ["---"] * 2 + ["---:"] * len(metrics)]
    previous = ""
    for (case, subject), figures in cells.items():
        lines.append([case if case != previous else "", subject, *(figures.get(m, "") for m in metrics)])
        previous = case
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def fill(text: str, *, results: Path = RESULTS) -> str:
    """Text with every block between ``<!-- table: name -->`` and ``<!-- end -->`` rendered anew."""
    blocks = [block[2] for block in _BLOCK.finditer(text)]
    if (opened := _START.findall(text)) != blocks:
        raise ValueError(f"a table of {', '.join(opened)} has no line <!-- end --> after it")
    return _BLOCK.sub(lambda block: f"{block[1]}\n{table(block[2], results=results)}\n{block[3]}", text)


def fill_documents(root: Path = ROOT, *, results: Path = RESULTS) -> list[Path]:
    """Render the tables of README.md and docs/ anew; returns the files that changed."""
    changed: list[Path] = []
    for path in [root / "README.md", *sorted((root / "docs").rglob("*.md"))]:
        if path.exists():
            old = path.read_text(encoding="utf-8")
            new = fill(old, results=results)
            if new != old:
                path.write_text(new, encoding="utf-8")
                changed.append(path)
    return changed


def format_value(value: float, unit: str) -> str:
    """A figure with its unit.

    >>> format_value(0.5, "s"), format_value(2**20, "B"), format_value(1.2, "x"), format_value(7, "")
    ('500 ms', '1.00 MiB', '1.20x', '7')
    """
    if unit == "s":
        return format_seconds(value)
    if unit == "B":
        return format_size(value)
    return f"{value:.2f}{unit}" if unit else f"{value:g}"


_SHARED: dict[str, dict[str, Any]] = {
    "data": {"help": "the folder with the data sets; LOWTIDE_DATA otherwise"},
    "device": {"choices": ["cpu", "cuda"], "help": "the GPU if there is one"},
    "draw": {"action": "store_true", "help": "draw the rows so far"},
    "epochs": {"type": int},
    "no_compile": {"action": "store_false", "dest": "compiled", "help": "leave torch.compile out"},
    "only": {"default": "", "help": "cases whose name holds this"},
    "quick": {"action": "store_true", "help": "a small run, with rows in a temporary folder"},
    "runs": {"type": int},
    "seeds": {"type": int},
    "results": {"type": Path, "default": RESULTS, "help": "where the rows go"},
}

_START = re.compile(r"^<!-- table: ([\w -]+) -->$", re.MULTILINE)
_BLOCK = re.compile(r"^(<!-- table: ([\w -]+) -->)$\n(?:(?!^<!-- table:).)*?^(<!-- end -->)$", re.MULTILINE | re.DOTALL)


def _row(entry: Mapping[str, str]) -> Row:
    return Row(
        entry["case"],
        entry["subject"],
        entry["metric"],
        *(float(entry[key]) for key in ("value", "low", "high")),
        entry["unit"],
        int(entry["repeats"]),
    )


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


if __name__ == "__main__":
    if sys.argv[1:] != ["tables"]:
        raise SystemExit("usage: python -m benchmarks.harness tables")
    for path in fill_documents():
        print(f"rendered {path.relative_to(ROOT)}")
