"""How small can a step become with all techniques together? A plan beside what people put together by hand.

    PYTHONPATH=src:. python -m benchmarks.bench_smallest [--results DIR]

WRN-28-2 on a batch of 100 with momentum, in 12 MB with ``allow="changed"``. By hand: bfloat16 autocast, the gradients
of small pieces summed, each block checkpointed. Peaks are of real steps; times in turns with the plain step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.harness import RESULTS, Row, arguments, record
from benchmarks.steps import plain_step, seconds_of
from lowtide import Workload, apply, plan, profile, zoo
from lowtide.undo import Applied, Undo

CASE = "WRN-28-2, batch 100"
BUDGET = "12MB"
PIECE = 4
REPEATS = 5


def main(results: Path = RESULTS) -> None:
    ways: dict[str, Callable[[Workload], Applied]] = {
        "plain step": Applied,
        f"by hand: pieces of {PIECE}, bf16, checkpoints": by_hand,
        f"plan for {BUDGET}": planned,
    }
    plain = zoo.workload("wrn28-2")
    rows: list[Row] = []
    for subject, way in ways.items():
        with way(zoo.workload("wrn28-2")) as applied:
            for _ in range(2):  # optimizer state exists from here on
                plain_step(applied.work)
            peak = profile(applied.work).peak_bytes
            pairs = [(seconds_of(plain, 1), seconds_of(applied.work, 1)) for _ in range(REPEATS)]
        rows += [
            Row.of(CASE, subject, "peak", [peak], "B"),
            Row.of(CASE, subject, "step", [mine for _, mine in pairs], "s"),
            Row.of(CASE, subject, "time", [mine / base for base, mine in pairs], "x"),
        ]
    record("smallest", rows, device="cpu", results=results)


def planned(work: Workload) -> Applied:
    step = apply(plan(work, BUDGET, allow="changed", compile=False, tune=False), work)
    return Applied(step.work, step.undo)


def by_hand(work: Workload) -> Applied:
    """Gradients of pieces, summed as they come; the last piece's backward pass is the step's own."""
    undo, stages = Undo(), work.model.get_submodule("stages")
    for block in (block for stage in stages.children() for block in stage.children()):
        undo.add(_checkpointed(block))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        images, labels = batch
        pieces = list(zip(images.split(PIECE), labels.split(PIECE), strict=True))
        total = torch.zeros(())
        for piece in pieces[:-1]:
            part = work.loss(model, piece) / len(pieces)
            part.backward()
            total += part.detach()
        return work.loss(model, pieces[-1]) / len(pieces) + total

    return Applied(replace(work, loss=loss, autocast=torch.bfloat16), undo)


def _checkpointed(block: nn.Module) -> Callable[[], object]:
    plain = block.forward
    block.forward = lambda x: checkpoint(plain, x, use_reentrant=False)
    return lambda: vars(block).pop("forward")


if __name__ == "__main__":
    main(**arguments(__doc__, "results"))
