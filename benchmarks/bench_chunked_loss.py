"""What does a head with its cross entropy take when the logits are never whole?

First the loss alone, forward and backward, at the shapes of GPT-2 medium with batch 16 and 1024 tokens, in bf16
autocast. Before anything is timed, gradients are compared with float64's: lowtide's error may be 1.5 times PyTorch's.
"time" is the GPU's, by replaying a CUDA graph; "time as launched" includes Python. "peak" is above static bytes, and
counts the gradients of the input and of the weight.

Then whole steps of GPT-2 medium with its blocks checkpointed: the gradients must be those of the step without chunks.

Without a GPU: the same at small shapes, in seconds.

    PYTHONPATH=src:. python -m benchmarks.bench_chunked_loss [--no-compile] [--results DIR]
"""

from __future__ import annotations

import gc
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.gpu_time import replayed, timed
from benchmarks.harness import RESULTS, Row, arguments, compare, record
from benchmarks.steps import Way, plain_step, under
from lowtide import Workload, profile, zoo
from lowtide.chains import Tree
from lowtide.techniques.chunked_loss import chunk_loss
from lowtide.techniques.segments import apply_tree


@dataclass(frozen=True)
class Shape:
    rows: int
    features: int
    classes: int
    chunks: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.rows:,} rows, {self.features} features, {self.classes:,} classes"


GPU_SHAPE = Shape(16384, 1024, 50257, (1024, 2048, 4096))
CPU_SHAPE = Shape(2048, 128, 8000, (256, 1024))


class Loss(nn.Module):
    """A head, and features that want a gradient as those of a model do."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.features = nn.Parameter(torch.randn(shape.rows, shape.features))
        self.head = nn.Linear(shape.features, shape.classes, bias=False)
        nn.init.normal_(self.head.weight, std=0.02 if shape.features > 512 else 0.1)

    def forward(self) -> Tensor:
        return self.head(self.features)


def main(*, compiled: bool = True, results: Path = RESULTS) -> None:
    torch.manual_seed(0)
    if torch.cuda.is_available():
        alone(GPU_SHAPE, "cuda", results, compiled=compiled)
        steps("gpt2-medium", {}, "cuda", results)
    else:
        torch.set_num_threads(1)
        alone(CPU_SHAPE, "cpu", results, compiled=False)
        small = {"layers": 8, "width": 128, "heads": 4, "vocab": 8000, "batch": 4, "seq": 128}
        steps("gpt2", small, "cpu", results)


# -- the loss alone ----------------------------------------------------------------------------------------


def alone(shape: Shape, device: str, results: Path, *, compiled: bool) -> None:
    model = Loss(shape).to(device)
    target = torch.randint(shape.classes, (shape.rows,), device=device)
    dtype = torch.bfloat16 if device == "cuda" else None
    work = Workload(model, lambda m, t: F.cross_entropy(m(), t), target, autocast=dtype)
    ways: dict[str, Way] = {"PyTorch eager": nullcontext}
    for rows in shape.chunks:
        ways[f"lowtide, chunks of {rows:,} rows"] = partial(chunk_loss, model.head, rows)
    case = f"the loss: {shape}, {'bf16 autocast' if dtype else 'float32'}"
    rows = errors(case, work, ways)
    peaks: dict[str, float] = {}
    for subject, way in ways.items():
        with way():
            peaks[subject] = peak_above_static(work)
            rows.append(Row.of(case, subject, "peak", [peaks[subject]], "B"))
            rows.append(Row.of(case, subject, "of PyTorch's", [100 * peaks[subject] / peaks["PyTorch eager"]], "%"))
    contenders = {subject: under(way, partial(gradients, work)) for subject, way in ways.items()}
    if compiled:
        quick = torch.compile(lambda m, t: F.cross_entropy(m(), t), dynamic=False)
        contenders["torch.compile"] = partial(gradients, replace(work, loss=quick))
        rows.append(Row.of(case, "torch.compile", "peak", [peak_above_static(replace(work, loss=quick))], "B"))
    if device == "cuda":
        for subject, run in contenders.items():
            rows.append(Row.of(case, subject, "time", replayed(run, calls=2, rounds=5), "s"))
            rows.append(Row.of(case, subject, "time as launched", timed(run, calls=3, rounds=5), "s"))
            torch.cuda.empty_cache()
    else:
        rows += compare(case, contenders, check=lambda: None, repeats=7, warmup=1)
    record("chunked_loss", rows, device=device, results=results)


def errors(case: str, work: Workload, ways: dict[str, Way]) -> list[Row]:
    """How far each way's gradients are from those of float64."""
    model = cast(Loss, work.model)
    x, w = (p.detach().double().requires_grad_() for p in (model.features, model.head.weight))
    # In parts: the logits of all rows would be large in float64.
    for first in range(0, len(x), 2048):
        part = slice(first, first + 2048)
        (F.cross_entropy(x[part] @ w.t(), work.batch[part], reduction="sum") / len(x)).backward()
    expected = [x.grad, w.grad]
    errors: dict[str, float] = {}
    for subject, way in ways.items():
        with way():
            mine = gradients(work)
        off = [float((a.double() - b).norm() / b.norm()) for a, b in zip(mine, expected, strict=True) if b is not None]
        errors[subject] = max(off)
    worst = 1.5 * errors["PyTorch eager"]
    if any(error > worst for error in errors.values()):
        raise SystemExit(f"{case}: errors {errors}")
    return [Row.of(case, subject, "error / PyTorch's", [e / worst * 1.5], "x") for subject, e in errors.items()]


def gradients(work: Workload) -> tuple[Tensor, ...]:
    """Compute the gradients of the features and of the weight."""
    return torch.autograd.grad(work.compute_loss(), list(work.model.parameters()))


# -- whole steps -------------------------------------------------------------------------------------------


def steps(name: str, options: dict[str, Any], device: str, results: Path) -> None:
    work = zoo.workload(name, device=device, optimizer="none", **options)
    fused = device == "cuda"
    work = replace(work, optimizer=torch.optim.AdamW(work.model.parameters(), lr=1e-4, fused=fused))
    if device == "cuda":
        work = in_16_bits(work)
    blocks = cast(nn.Sequential, work.model.get_submodule("blocks"))
    head = cast(nn.Linear, work.model.get_submodule("head"))
    count = len(blocks)
    pairs = count // 3  # from here on, blocks are checkpointed in pairs, and again one by one inside
    each: Tree = tuple((i,) for i in range(count))
    nested: Tree = (*((i,) for i in range(pairs)), *(((i,), (i + 1,)) for i in range(pairs, count, 2)))
    ways: dict[str, Way] = {
        "checkpoint every block": lambda: both(blocks, each, None),
        "and chunked loss": lambda: both(blocks, each, head),
        f"and the last {count - pairs} blocks in nested pairs": lambda: both(blocks, nested, head),
    }
    batch, length = work.batch[0].shape
    how = "bf16 autocast without its cache" if device == "cuda" else "float32"
    case = f"{name}, {count} blocks, batch {batch} x {length}, {how}"
    rows: list[Row] = []
    expected: Tensor | None = None
    for subject, way in ways.items():
        with way():
            actual = step_gradients(work)
        expected = actual if expected is None else expected
        off = float((actual - expected).norm() / expected.norm())
        del actual
        if off > (5e-2 if device == "cuda" else 1e-4):
            raise SystemExit(f"{case}, {subject}: gradients differ by {off:.1e}")
        rows.append(Row.of(case, subject, "gradients differ by", [off], ""))
    del expected
    for subject, way in ways.items():
        with way():
            rows.append(Row.of(case, subject, "peak", [peak_above_static(work)], "B"))
    contenders = {subject: under(way, partial(plain_step, work)) for subject, way in ways.items()}
    rows += compare(case, contenders, check=lambda: None, repeats=5, warmup=1, device=device)
    record("chunked_loss", rows, device=device, results=results)


def both(blocks: nn.Sequential, tree: Tree, head: nn.Linear | None) -> ExitStack:
    stack = ExitStack()
    stack.enter_context(apply_tree(blocks, tree, path="blocks"))
    if head is not None:
        stack.enter_context(chunk_loss(head, path="head"))
    return stack


def in_16_bits(work: Workload) -> Workload:
    """By autocast that keeps no 16-bit copy of every weight until the forward pass ends: 0.66 GiB in GPT-2 medium."""
    inner = work.loss

    def loss(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16, cache_enabled=False):
            return inner(model, batch)

    return replace(work, loss=loss)


def step_gradients(work: Workload) -> Tensor:
    """All gradients as one vector."""
    torch.manual_seed(0)
    work.model.zero_grad()
    work.compute_loss().backward()
    joined = torch.cat([p.grad.flatten() for p in work.model.parameters() if p.grad is not None])
    work.model.zero_grad()
    return joined


def peak_above_static(work: Workload) -> float:
    """Measure the second of two steps."""
    if work.device.type != "cuda":
        profiled = profile(work)
        return profiled.peak_bytes - profiled.static_bytes
    for _ in range(2):
        work.model.zero_grad()
        gc.collect()
        torch.cuda.synchronize()
        static = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        work.compute_loss().backward()
        if work.optimizer is not None:
            work.optimizer.step()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - static
    work.model.zero_grad()
    return peak


if __name__ == "__main__":
    main(**arguments(__doc__, "no_compile", "results"))
