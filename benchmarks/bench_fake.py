"""What does a step that does not run cost? GPT-2 medium under 5 s and 800 MB, the GPT-2 heat map under 40 s."""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from pathlib import Path

import torch

from benchmarks.harness import RESULTS, Row, arguments, record
from lowtide import profile, sweep, zoo
from lowtide.workload import Workload

BATCHES = (8, 16, 20, 24, 32, 64, 128)
LENGTHS = (512, 1024, 1536, 2048, 2560, 3072)
LIMITS = {"time": 5.0, "resident memory": 800e6, "heat map": 40.0}


def main(*, results: Path = RESULTS) -> None:
    alone = [sys.executable, "-m", "benchmarks.bench_fake", "medium"]
    seconds, resident = map(float, subprocess.run(alone, check=True, capture_output=True, text=True).stdout.split())
    case = "GPT-2 medium, batch 16 x 1024, bf16 autocast, for the H200"
    start = time.perf_counter()
    grid = sweep(_gpt2, device="v100", batch=BATCHES, seq=LENGTHS)
    taken = time.perf_counter() - start
    check = grid.cells[len(grid.cells) // 2]  # one that was worked out, against its own trace
    assert profile(_gpt2(**check.point), device="v100").peak_bytes == check.peak_bytes
    record(
        "fake",
        [
            Row.of(case, "one fake profile, the first of a process", "time", [seconds], "s"),
            Row.of(case, "one fake profile, the first of a process", "resident memory", [resident], "B"),
            Row.of("GPT-2, 7 batches by 6 lengths, for the V100", "heat map", "time", [taken], "s"),
            Row.of("GPT-2, 7 batches by 6 lengths, for the V100", "heat map", "points traced", [grid.traced], ""),
        ],
        results=results,
    )
    if seconds > LIMITS["time"] or resident > LIMITS["resident memory"] or taken > LIMITS["heat map"]:
        raise SystemExit(f"{seconds:.1f} s, {resident / 1e6:.0f} MB, heat map {taken:.1f} s: over {LIMITS}")


def _gpt2(batch: int, seq: int) -> Workload:
    return zoo.workload("gpt2", batch=batch, seq=seq, block_size=max(LENGTHS), device="meta")


def _medium() -> None:
    """Alone in a process, so that nothing is warm and the memory is this step's."""
    work = zoo.workload("gpt2-medium", batch=16, seq=1024, device="meta", autocast=torch.bfloat16)
    start = time.perf_counter()
    profile(work, device="h200")
    print(time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


if __name__ == "__main__":
    _medium() if sys.argv[1:] == ["medium"] else main(**arguments(__doc__, "results"))
