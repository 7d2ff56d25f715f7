"""Small, plain models that tests, examples and benchmarks share.

>>> from lowtide import zoo
>>> work = zoo.workload("resnet18", batch=2, image=64, device="meta")
>>> work.name, [list(tensor.shape) for tensor in work.batch]
('resnet18', [[2, 3, 64, 64], [2]])
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lowtide.errors import WorkloadError, unknown_name
from lowtide.workload import Workload
from lowtide.zoo.batches import classification_loss, next_token_loss, random_batch
from lowtide.zoo.catalog import ENTRIES, Entry

__all__ = ["model", "names", "small", "workload"]


def names() -> list[str]:
    """The names that ``model``, ``workload`` and ``small`` take."""
    return list(ENTRIES)


def model(name: str, **options: Any) -> nn.Module:
    """Build a model by name; ``options`` are its class's keyword arguments.

    Parameters are drawn from the global generator, on the default device, like any ``nn.Module``'s.

    >>> with torch.device("meta"):
    ...     gpt = model("gpt2-medium", layers=2)
    """
    entry = _entry(name)
    builder = _builder(entry)
    return builder(**_settings(name, entry, builder, options))


def workload(
    name: str,
    *,
    batch: int | None = None,
    seq: int | None = None,
    image: int | None = None,
    optimizer: str | None = None,
    device: str | torch.device = "cpu",
    autocast: torch.dtype | None = None,
    seed: int = 0,
    channels_last: bool = False,
    **options: Any,
) -> Workload:
    """Build a training step by name: model, random batch, cross entropy, optimizer, all on ``device``.

    ``image`` is pixels per side; ``seq`` is tokens, or samples for the 1-D ResNets. ``optimizer`` is "sgd"
    (momentum 0.9), "adam", "adamw", "none", or None for the family's usual one. A ``seed`` gives the same
    parameters and batch on every device. Global generators stay as they are. On "meta" nothing is allocated.
    """
    entry = _entry(name)
    builder = _builder(entry)
    size = _size(name, entry, seq=seq, image=image)
    count = entry.batch if batch is None else batch
    if count < 1:
        raise WorkloadError(f"A batch of {count} is empty", where=f"zoo:{name}")
    settings = _settings(name, entry, builder, options, also=inspect.signature(workload).parameters)
    if settings.get("block_size", size) < size:
        if "block_size" in options:
            raise WorkloadError(f"seq={size} is longer than block_size={options['block_size']}", where=f"zoo:{name}")
        settings["block_size"] = size
    if channels_last and (entry.inputs not in ("images", "pixels") or settings.get("dims", 2) != 2):
        raise WorkloadError("channels_last is for images", where=f"zoo:{name}")
    device = torch.device(device)
    with seeded(seed, device):
        net = builder(**settings)
        x, target = random_batch(entry.inputs, count, size, settings)
    net, x, target = net.to(device), x.to(device), target.to(device)
    if channels_last:
        net.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]: not in torch's stub
        x = x.to(memory_format=torch.channels_last)
    return Workload(
        net,
        next_token_loss if entry.inputs == "tokens" else classification_loss,
        (x, target),
        make_optimizer(entry.optimizer if optimizer is None else optimizer, net, where=f"zoo:{name}"),
        autocast=autocast,
        name=name,
    )


def small(name: str, **changes: Any) -> Workload:
    """The same model with less depth, width and input: a step takes well under a second on two cores.

    ``changes`` are arguments of ``workload`` to set otherwise.

    >>> small("gpt2", optimizer="none").optimizer is None
    True
    """
    return workload(name, **{**_entry(name).small, **changes})


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer | None]] = {
    "sgd": lambda net: torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9),
    "adam": lambda net: torch.optim.Adam(net.parameters(), lr=1e-3),
    "adamw": lambda net: torch.optim.AdamW(net.parameters(), lr=3e-4),
    "none": lambda net: None,
}


def make_optimizer(name: str, net: nn.Module, *, where: str) -> torch.optim.Optimizer | None:
    if name not in OPTIMIZERS:
        raise unknown_name("optimizer", name, OPTIMIZERS, where=where)
    return OPTIMIZERS[name](net)


@contextmanager
def seeded(seed: int, device: torch.device) -> Generator[None]:
    """Draw from a seeded CPU generator, on the CPU or on "meta", and restore the global one."""
    # Not torch.manual_seed, which would reseed every GPU too: only the CPU draws here.
    with torch.random.fork_rng(devices=[]), torch.device("meta" if device.type == "meta" else "cpu"):
        torch.default_generator.manual_seed(seed)
        yield


def _entry(name: str) -> Entry:
    if name not in ENTRIES:
        raise unknown_name("model", name, ENTRIES, where="lowtide.zoo")
    return ENTRIES[name]


def _builder(entry: Entry) -> Callable[..., nn.Module]:
    module, _, attribute = entry.source.partition(":")
    return getattr(importlib.import_module(f"lowtide.zoo.{module}"), attribute)


def _settings(
    name: str,
    entry: Entry,
    builder: Callable[..., nn.Module],
    options: Mapping[str, Any],
    *,
    also: Collection[str] = (),
) -> dict[str, Any]:
    """Merge the class's defaults, the name's options and the caller's. ``also`` are other names to suggest."""
    parameters = inspect.signature(builder).parameters
    for option in options:
        if option not in parameters:
            names = [*parameters, *(other for other in also if other not in ("name", "options"))]
            raise unknown_name("option", option, names, where=f"zoo:{name}")
    defaults = {key: p.default for key, p in parameters.items() if p.default is not p.empty}
    return {**defaults, **entry.options, **options}


def _size(name: str, entry: Entry, *, seq: int | None, image: int | None) -> int:
    is_image = entry.inputs in ("images", "pixels")
    size, wrong = (image, seq) if is_image else (seq, image)
    if wrong is not None:
        right = "image (pixels per side), not seq" if is_image else "seq, not image"
        raise WorkloadError(f"{name} takes {right}", where=f"zoo:{name}")
    size = entry.size if size is None else size
    if size not in entry.sizes:
        first, step = entry.sizes.start, entry.sizes.step
        takes = f"{first}" if len(entry.sizes) == 1 else f"{first}, {first + step}, {first + 2 * step}, ..."
        raise WorkloadError(
            f"{name} does not take {'image' if is_image else 'seq'}={size}",
            where=f"zoo:{name}",
            hint=f"It takes {takes}.",
        )
    return size
