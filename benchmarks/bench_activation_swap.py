"""Does it matter which of ReLU and leaky ReLU a network was trained with, or is validated with? On CIFAR-10.

In-place batch norm needs an activation that can be inverted: leaky ReLU, of slope 0.01. Table 1 of its paper (Rota
Bulò, Porzi and Kontschieder, 2018) trains one ResNeXt-101 on ImageNet with each of the two. It validates each with
both. The accuracies are within a point, from one run each. This benchmark trains a small ResNet-18 several times with
each. A seed gives both the same parameters and batches, and accuracies are compared seed by seed.

The images stay on the device, where they are cropped and flipped. Rows are appended after every seed. Needs a folder
with CIFAR-10; without a GPU it is left out unless it is asked for.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.data import Samples, cifar10
from benchmarks.harness import Row, arguments, default_device, record, results_of, skip
from lowtide import LowtideError, zoo

NAME = "activation_swap"
ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "ReLU": lambda: nn.ReLU(inplace=True),
    "leaky ReLU": lambda: nn.LeakyReLU(0.01, inplace=True),
}
# As the paper's table has them: trained with, validated with.
PAIRS = [("ReLU", "ReLU"), ("ReLU", "leaky ReLU"), ("leaky ReLU", "leaky ReLU"), ("leaky ReLU", "ReLU")]


def main(
    data: str | None = None,
    device: str | None = None,
    epochs: int = 20,
    seeds: int = 5,
    quick: bool = False,
    results: Path | None = None,
) -> None:
    if device is None and not quick and not torch.cuda.is_available():
        skip("it takes hours without a GPU; --quick tries it, --device cpu insists")
    device = device or default_device()
    results = results_of(results, quick=quick)
    try:
        train_set, test_set = cifar10(data)
    except LowtideError as error:
        skip(str(error))
    width = 32
    if quick:
        epochs, seeds, width = 1, 2, 8
        train_set, test_set = (Samples(part.inputs[:512], part.labels[:512]) for part in (train_set, test_set))
    train_set, test_set = (Samples(part.inputs.to(device), part.labels.to(device)) for part in (train_set, test_set))
    case = f"CIFAR-10, ResNet-18 of width {width}, {epochs} epoch{'' if epochs == 1 else 's'}"
    print(f"{case}: {len(train_set.labels):,} training images, on {device}", flush=True)
    accuracies: dict[tuple[str, str], list[float]] = {pair: [] for pair in PAIRS}
    for seed in range(seeds):
        for trained in ACTIVATIONS:
            model = train(train_set, trained, width=width, epochs=epochs, seed=seed, device=device)
            for validated in ACTIVATIONS:
                accuracies[trained, validated].append(validate(model, test_set, validated))
            shown = ", ".join(f"{accuracies[trained, other][-1]:.2f}% with {other}" for other in ACTIVATIONS)
            print(f"  seed {seed}, trained with {trained}: {shown}", flush=True)
        record(NAME, rows(case, accuracies), device=device, results=results)


def rows(case: str, accuracies: dict[tuple[str, str], list[float]]) -> list[Row]:
    table_rows: list[Row] = []
    for trained, validated in PAIRS:
        subject = f"trained with {trained}, validated with {validated}"
        mine = accuracies[trained, validated]
        table_rows.append(Row.of(case, subject, "mean accuracy", [statistics.fmean(mine)], "%"))
        spread = statistics.stdev(mine) if len(mine) > 1 else 0.0
        table_rows.append(Row.of(case, subject, "standard deviation", [spread], "%"))
        table_rows.append(Row.of(case, subject, "seeds", [len(mine)], ""))
        table_rows.append(Row.of(case, subject, "median accuracy", mine, "%"))
        # Seed by seed, since two runs differ more by their seeds than by their activations.
        for name, other in (("swap alone", accuracies[trained, trained]), ("from all ReLU", accuracies[PAIRS[0]])):
            table_rows.append(Row.of(case, subject, name, [a - b for a, b in zip(mine, other, strict=True)], "%"))
    return table_rows


# -- One run -------------------------------------------------------------------------------------------


def build(width: int) -> nn.Module:
    """The zoo's ResNet-18 for small images: its stem is one 3x3 convolution that keeps the size."""
    model = zoo.model("resnet18", width=width, classes=10)
    stem = nn.Conv2d(3, width, kernel_size=3, padding=1, bias=False)
    nn.init.kaiming_normal_(stem.weight, mode="fan_out", nonlinearity="relu")
    model.stem = nn.Sequential(stem, nn.BatchNorm2d(width), nn.ReLU(inplace=True))
    return model


def activate(model: nn.Module, name: str) -> None:
    """Put an activation in the place of every ReLU and leaky ReLU."""
    for parent in list(model.modules()):
        for child_name, child in parent.named_children():
            if isinstance(child, nn.ReLU | nn.LeakyReLU):
                setattr(parent, child_name, ACTIVATIONS[name]())


def train(samples: Samples, activation: str, *, width: int, epochs: int, seed: int, device: str) -> nn.Module:
    torch.manual_seed(seed)
    model = build(width)
    activate(model, activation)
    model.to(device=device, memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]: not in torch's stub
    batch = 512 if device == "cuda" else 128
    count = len(samples.labels)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)
    steps = -(-count // batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.4 * batch / 512, epochs=epochs, steps_per_epoch=steps)
    random = torch.Generator(device).manual_seed(seed)
    model.train()
    start = time.perf_counter()
    for epoch in range(epochs):
        total = torch.zeros((), device=device)
        for chosen in torch.randperm(count, generator=random, device=device).split(batch):
            inputs = augment(samples.inputs[chosen], random).contiguous(memory_format=torch.channels_last)
            with _autocast(device):
                loss = F.cross_entropy(model(inputs), samples.labels[chosen])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.detach() * len(chosen)
        if epoch % 5 == 4 or epoch == epochs - 1:
            taken = time.perf_counter() - start
            print(f"    {activation}, epoch {epoch + 1}: loss {float(total) / count:.3f}, {taken:.1f} s", flush=True)
    return model


def augment(images: Tensor, random: torch.Generator, margin: int = 4) -> Tensor:
    """Each image shifted by up to ``margin`` pixels, zeros coming in, and every second one mirrored."""
    count, channels, height, width = images.shape
    device = images.device
    padded = F.pad(images, (margin,) * 4)
    shift = torch.randint(0, 2 * margin + 1, (2, count, 1), generator=random, device=device)
    rows = shift[0] + torch.arange(height, device=device)
    columns = shift[1] + torch.arange(width, device=device)
    mirrored = torch.rand(count, 1, generator=random, device=device) < 0.5
    columns = torch.where(mirrored, columns.flip(1), columns)
    which = torch.arange(count, device=device).view(-1, 1, 1, 1)
    colour = torch.arange(channels, device=device).view(1, -1, 1, 1)
    return padded[which, colour, rows[:, None, :, None], columns[:, None, None, :]]


@torch.no_grad()
def validate(model: nn.Module, samples: Samples, activation: str) -> float:
    """Per cent right with this activation, whatever the model was trained with; batch norm keeps its statistics."""
    activate(model, activation)
    model.eval()
    right = 0
    for inputs, labels in zip(samples.inputs.split(1000), samples.labels.split(1000), strict=True):
        with _autocast(inputs.device.type):
            right += int((model(inputs.contiguous(memory_format=torch.channels_last)).argmax(1) == labels).sum())
    return 100 * right / len(samples.labels)


def _autocast(device: str) -> AbstractContextManager[object]:
    return torch.autocast(device, torch.bfloat16, enabled=device == "cuda")


if __name__ == "__main__":
    own = {"epochs": {"default": 20}, "seeds": {"default": 5}, "results": {"default": None}}
    main(**arguments(__doc__, "data", "device", "quick", **own))
