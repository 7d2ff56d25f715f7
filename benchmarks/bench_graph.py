"""What does the graph engine add to an op? Steps of tiny tensors, which are all overhead, beside plain PyTorch's.

The program keeps everything, so that it runs the plain step's ops, each once. One thread computes.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import RESULTS, Row, arguments, compare, default_device, record
from benchmarks.steps import outcome, plain_step
from lowtide import Workload, profile, zoo
from lowtide.engines.graph import planned_loss
from lowtide.planning.programs.strategies import plain

CASES: dict[str, dict[str, Any]] = {
    "ResNet-101 of width 4, batch 2 x 32 x 32": {"name": "resnet101", "batch": 2, "image": 32, "width": 4},
    "GPT-2 of width 16, batch 1 x 16": {"name": "gpt2", "batch": 1, "seq": 16, "width": 16, "heads": 2, "vocab": 64},
}


def main(repeats: int = 25, results: Path = RESULTS) -> None:
    torch.set_num_threads(1)
    device = default_device()
    rows: list[Row] = []
    for case, options in CASES.items():
        rows += measure(case, zoo.workload(device=device, **options), repeats)
    record("graph", rows, device=device, results=results)


def measure(case: str, work: Workload, repeats: int) -> list[Row]:
    by_program = planned_loss(work, plain)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return by_program(batch)

    planned = replace(work, loss=loss)
    ways = {"plain PyTorch": work, "graph engine": planned}

    def check() -> None:
        expected, programmed = map(outcome, ways.values())
        different = [name for name, value in expected.items() if not torch.equal(programmed[name], value)]
        if different:
            raise SystemExit(f"{case}: {different[0]} differs from the plain step's")

    steps = {subject: lambda step=step: plain_step(step) for subject, step in ways.items()}
    rows = compare(case, steps, check=check, repeats=repeats, device=work.device.type)
    ops = len(profile(work).graph.ops)
    times = [row for row in rows if row.metric == "time"]
    each = [replace(t, metric="for each op", value=t.value / ops, low=t.low / ops, high=t.high / ops) for t in times]
    return [*rows, *each]


if __name__ == "__main__":
    main(**arguments(__doc__, "results"))
