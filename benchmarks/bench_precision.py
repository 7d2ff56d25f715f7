"""What does a step in 16 bits take, and how far are its gradients from the plain step's?

A small GPT-2 on a CPU, GPT-2 medium's width on a GPU. "gradient error" is the norm of the difference from the float32
step's gradients, relative to theirs. On a CPU without instructions for bfloat16, it is slow; the peak is the point.

    PYTHONPATH=src:. python -m benchmarks.bench_precision [--results DIR]
"""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import RESULTS, Row, arguments, compare, default_device, record
from benchmarks.steps import plain_step
from lowtide import Workload, profile, zoo
from lowtide.techniques import Option, techniques


def main(*, results: Path = RESULTS) -> None:
    device = default_device()
    large = device == "cuda"
    sizes: dict[str, Any] = {"layers": 8, "width": 1024, "heads": 16, "batch": 8, "seq": 512} if large else {
        "layers": 4, "width": 256, "heads": 4, "vocab": 2000, "batch": 4, "seq": 64,
    }  # fmt: skip
    case = f"GPT-2, {sizes['layers']} blocks of width {sizes['width']}, batch {sizes['batch']} x {sizes['seq']}"
    work = zoo.workload("gpt2", optimizer="adamw", dropout=0.0, device=device, **sizes)
    technique = techniques()["precision"]
    plain = profile(work)
    exact = gradients(work)
    start = copy.deepcopy(work.model.state_dict())
    rows: list[Row] = []
    options: list[Option | None] = [None, *technique.options(plain)]
    for option in options:
        subject = "float32" if option is None else _name(option)
        applied = None if option is None else technique.apply(work, [option])
        step = work if applied is None else applied.work
        profiled = plain if applied is None else profile(step)
        error = float((gradients(step) - exact).norm() / exact.norm())
        if error > 0.1:
            raise SystemExit(f"{subject}: the gradients differ by {error:.1e}")
        rows.append(Row.of(case, subject, "peak", [profiled.peak_bytes], "B"))
        rows.append(Row.of(case, subject, "saved for backward", [profiled.saved_bytes], "B"))
        rows.append(Row.of(case, subject, "gradient error", [round(100 * error, 3)], "%"))
        rows += compare(case, {subject: partial(plain_step, step)}, check=lambda: None, repeats=5, device=device)[:1]
        if applied is not None:
            applied()
        work.model.load_state_dict(start)  # all of them from the same weights
    record("precision", rows, device=device, results=results)


def gradients(work: Workload) -> Tensor:
    work.model.zero_grad()
    work.compute_loss().backward()
    return torch.cat([p.grad.float().flatten() for p in work.model.parameters() if p.grad is not None])


def _name(option: Option) -> str:
    if option.config.weights:
        return f"bfloat16 weights, {option.config.rounding}"
    return f"autocast to {option.config.autocast}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(**arguments(__doc__, "results"))
