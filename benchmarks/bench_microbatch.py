"""What does a batch in pieces save, what does it cost, and what does it change? Beside a loop that accumulates.

Before anything is timed, gradients are compared with the full batch's. Without batch norm they must be the same to
rounding. With it, lowtide's must be those of the loop. The quality of steps with batch norm, which are changed ones,
is the accuracy of a LeNet on MNIST (with --data or LOWTIDE_DATA). On a CPU one thread computes.

    PYTHONPATH=src:. python -m benchmarks.bench_microbatch [--data DIR] [--results DIR]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.data import mnist
from benchmarks.harness import RESULTS, Row, arguments, compare, default_device, record
from benchmarks.steps import cuda_peak, plain_step, relative_error
from lowtide import Workload, microbatch, profile, zoo
from lowtide.errors import LowtideError
from lowtide.tracing.snapshot import unchanged
from lowtide.zoo.batches import classification_loss

# The model, the sizes of a piece, and how far from the loop's gradients lowtide's may be.
Case = tuple[dict[str, Any], tuple[int, ...], float]
CPU: dict[str, Case] = {
    "GPT-2, 6 blocks of width 128, batch 16 x 64": (
        {"name": "gpt2", "layers": 6, "width": 128, "heads": 4, "vocab": 512, "batch": 16, "seq": 64, "dropout": 0.0},
        (8, 4, 2),
        1e-4,
    ),
    "WRN-28-2, batch 20": ({"name": "wrn28-2", "batch": 20}, (10, 4), 1e-3),
}
GPU: dict[str, Case] = {
    "GPT-2 medium, bf16 autocast, batch 16 x 1024": (
        {"name": "gpt2-medium", "dropout": 0.0, "autocast": torch.bfloat16},
        (8, 4, 2),
        3e-2,
    ),
    "ResNet-50, batch 256": ({"name": "resnet50", "batch": 256}, (128, 64, 32), 3e-2),
}

# The training with batch norm.
BATCH, IMAGES, EPOCHS, SEEDS = 128, 6_000, 2, (0, 1, 2)


def main(*, data: str | None = None, repeats: int = 5, results: Path = RESULTS) -> None:
    device = default_device()
    rows: list[Row] = []
    for case, (options, sizes, tolerance) in (GPU if device == "cuda" else CPU).items():
        work = zoo.workload(device=device, optimizer="sgd", **options)
        rows += measure(case, work, sizes, tolerance, device, repeats)
        del work
        if device == "cuda":
            torch.cuda.empty_cache()
    record("microbatch", rows, device=device, results=results)
    try:
        train, test = mnist(data)
    except LowtideError as error:
        print(f"no quality: {error}")
        return
    record("microbatch_quality", quality(train, test, device), device=device, results=results)


# -- bytes and seconds -----------------------------------------------------------------------------------


def by_hand(work: Workload, size: int) -> Tensor:
    """Accumulate gradients as people do without lowtide."""
    assert work.optimizer is not None
    work.optimizer.zero_grad(set_to_none=True)
    x, y = work.batch
    total = torch.zeros((), device=x.device)
    for start in range(0, len(x), size):
        part = x[start : start + size], y[start : start + size]
        loss = work.compute_loss(batch=part) * (len(part[0]) / len(x))
        loss.backward()
        total += loss.detach()
    work.optimizer.step()
    return total


def measure(
    case: str, work: Workload, sizes: tuple[int, ...], tolerance: float, device: str, repeats: int
) -> list[Row]:
    normed = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in work.model.modules())
    ways: dict[str, Callable[[], object]] = {"plain step": lambda: plain_step(work)}
    traced: dict[str, Workload] = {"plain step": work}
    for size in sizes:
        pieces = microbatch(work, size)
        ways[f"a loop, pieces of {size}"] = lambda size=size: by_hand(work, size)
        ways[f"lowtide, pieces of {size}"] = lambda pieces=pieces: plain_step(pieces)
        traced[f"lowtide, pieces of {size}"] = pieces
    if normed:
        exact = microbatch(work, sizes[-1], exact=True)
        ways[f"lowtide, pieces of {sizes[-1]}, exact"] = lambda: plain_step(exact)
        traced[f"lowtide, pieces of {sizes[-1]}, exact"] = exact
    expected = gradients(work, ways["plain step"])
    rows: list[Row] = []
    for subject, run in ways.items():
        actual = gradients(work, run)
        error = relative_error(actual, expected)
        loop = ways.get(subject.replace("lowtide", "a loop"))
        if loop is not None and subject.startswith("lowtide"):
            reference = gradients(work, loop) if normed else expected
            if relative_error(actual, reference) > tolerance:
                raise SystemExit(f"{case}, {subject}: gradients are off by {relative_error(actual, reference):.1e}")
        if device == "cuda":
            with unchanged(work):  # the next ones' gradients are of the same weights
                run()
                peak = cuda_peak(run)
        elif subject in traced:
            peak = profile(traced[subject]).peak_bytes
        else:
            peak = None  # a loop has no loss to trace
        if peak is not None:
            rows.append(Row.of(case, subject, "peak", [peak], "B"))
        rows.append(Row.of(case, subject, "gradients off by", [100 * error], "%"))
    return rows + compare(case, ways, check=lambda: None, repeats=repeats, warmup=1, device=device)


def gradients(work: Workload, run: Callable[[], object]) -> list[Tensor]:
    """Copy the gradients of one step, then restore the state before it."""
    with unchanged(work):
        run()
        return [p.grad.detach().clone() for p in work.model.parameters() if p.grad is not None]


# -- quality ---------------------------------------------------------------------------------------------


def quality(train: Any, test: Any, device: str) -> list[Row]:
    """Accuracy after a short training with batch norm, by piece and by whole batch."""
    case = f"LeNet with batch norm on {IMAGES} digits, {EPOCHS} epochs, batch {BATCH}"
    ways: dict[str, Callable[[Workload], Workload]] = {"plain step": lambda work: work}
    for size in (32, 8):
        ways[f"pieces of {size}"] = lambda work, size=size: microbatch(work, size)
        ways[f"pieces of {size}, exact"] = lambda work, size=size: microbatch(work, size, exact=True)
    rows: list[Row] = []
    for subject, way in ways.items():
        accuracies = [100 * accuracy(way, train, test, seed, device) for seed in SEEDS]
        mean = sum(accuracies) / len(accuracies)
        rows.append(Row(case, subject, "accuracy", mean, min(accuracies), max(accuracies), "%", len(accuracies)))
    return rows


def accuracy(way: Callable[[Workload], Workload], train: Any, test: Any, seed: int, device: str) -> float:
    torch.manual_seed(seed)
    model = zoo.model("lenet").to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    images, labels = train.inputs[:IMAGES].to(device), train.labels[:IMAGES].to(device)
    work = way(Workload(model, classification_loss, (images[:BATCH], labels[:BATCH]), optimizer))
    for _ in range(EPOCHS):
        for chosen in torch.randperm(IMAGES).split(BATCH)[:-1]:
            plain_step(replace(work, batch=(images[chosen], labels[chosen])))
    model.eval()
    with torch.no_grad():
        predicted = torch.cat([model(part.to(device)).argmax(1) for part in test.inputs.split(1000)])
    return float((predicted.cpu() == test.labels).float().mean())


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(**arguments(__doc__, "data", "results"))
