"""How long does ``import lowtide`` take after ``import torch``? At most 0.3 s, and it brings no package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.harness import RESULTS, ROOT, Row, arguments, record

# Each sample is a fresh interpreter that times the second part after the first.
SUBJECTS = {
    "import torch": ("pass", "import torch"),
    "then import lowtide": ("import torch", "import lowtide"),
    "then use every name of it": (
        "import torch, lowtide",
        "[getattr(lowtide, name) for name in lowtide.__all__]",
    ),
}
LIMIT_SECONDS = 0.3


def main(repeats: int = 5, results: Path = RESULTS) -> None:
    check()
    samples: dict[str, list[float]] = {subject: [] for subject in SUBJECTS}
    for _ in range(repeats):
        for subject, (before, timed) in SUBJECTS.items():
            samples[subject].append(seconds(before, timed))
    rows = [Row.of("a new interpreter", subject, "time", taken, "s") for subject, taken in samples.items()]
    record("import", rows, results=results)
    if rows[1].value > LIMIT_SECONDS:
        raise SystemExit(f"import lowtide takes {rows[1].value:.2f} s, more than {LIMIT_SECONDS} s")


def check() -> None:
    """Raise unless the import starts no CUDA and brings nothing beyond torch, numpy and scipy."""
    data = json.loads(
        run(
            "import sys, json, torch, numpy, scipy; before = set(sys.modules); import lowtide;"
            "new = {name.partition('.')[0] for name in set(sys.modules) - before};"
            "print(json.dumps([sorted(new - sys.stdlib_module_names), torch.cuda.is_initialized()]))"
        )
    )
    if data != [["lowtide"], False]:
        raise SystemExit(f"import lowtide brought {data[0]}, with CUDA {'on' if data[1] else 'off'}")


def seconds(before: str, timed: str) -> float:
    return float(
        run(f"import time\n{before}\nstart = time.perf_counter()\n{timed}\nprint(time.perf_counter() - start)")
    )


def run(code: str) -> str:
    """The output of a fresh interpreter that has the source tree on its path."""
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-c", code]
    return subprocess.check_output(command, env={**os.environ, "PYTHONPATH": path}, text=True)


if __name__ == "__main__":
    main(**arguments(__doc__, "results"))
