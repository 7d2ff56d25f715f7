"""The zoo's table: for every name its class, its usual batch, and a small version for tests on a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lowtide.zoo.batches import Inputs


@dataclass(frozen=True)
class Entry:
    """One row. ``size`` is pixels per side, samples or tokens; ``sizes`` are those that the model takes.

    ``options`` go to the class; ``small`` goes to ``workload``: the same structure with less depth and width.
    No batch norm of a small model sees fewer than 8 values per channel: with 2, its input gradient vanishes.
    """

    source: str  # module:class
    inputs: Inputs
    batch: int
    size: int
    small: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    sizes: range = range(1, 2**31)
    optimizer: str = "sgd"


_SMALL_TRANSFORMER = {"batch": 2, "seq": 32, "layers": 2, "width": 64, "heads": 4, "vocab": 256}


def _resnet(depth: int, *, group_width: int = 0) -> Entry:
    groups: dict[str, Any] = {"groups": 32, "group_width": group_width} if group_width else {}
    small_width = 128 // group_width if group_width else 16  # two channels in a group, in the first stage
    small = {"batch": 4, "image": 64, "width": small_width, "classes": 10}
    return Entry("resnet:ResNet", "images", batch=64, size=224, options={"depth": depth, **groups}, small=small)


def _resnet_1d(depth: int) -> Entry:
    """A second of speech at 8 kHz, and the 35 words of Speech Commands."""
    options = {"depth": depth, "dims": 1, "channels": 1, "classes": 35}
    small = {"batch": 2, "seq": 500, "width": 16}
    return Entry("resnet:ResNet", "signals", batch=32, size=8000, options=options, small=small)


def _gpt2(*, batch: int, **options: Any) -> Entry:
    return Entry(
        "gpt2:GPT2", "tokens", batch=batch, size=1024, options=options, small=_SMALL_TRANSFORMER, optimizer="adamw"
    )


ENTRIES: dict[str, Entry] = {
    "lenet": Entry("lenet:LeNet", "images", batch=64, size=28, sizes=range(28, 29), small={"batch": 8}),
    **{f"resnet{depth}": _resnet(depth) for depth in (18, 34, 50, 101, 152)},
    **{f"resnet{depth}-1d": _resnet_1d(depth) for depth in (18, 34, 50, 101, 152)},
    "resnext50": _resnet(50, group_width=4),
    "resnext101": _resnet(101, group_width=8),
    "resnext152": _resnet(152, group_width=4),
    "wrn28-2": Entry(
        "wideresnet:WideResNet", "images", batch=100, size=32,
        options={"depth": 28, "widen": 2}, small={"batch": 2, "depth": 16, "widen": 1},
    ),
    "wrn38": Entry(
        "wideresnet:WiderResNet", "images", batch=32, size=224,
        small={"batch": 4, "image": 64, "blocks": (1, 1, 2, 1, 1, 1), "width": 4, "classes": 10},
    ),
    "densenet121": Entry(
        "densenet:DenseNet", "images", batch=64, size=224, sizes=range(32, 2**31),
        small={"batch": 4, "image": 64, "blocks": (2, 3, 4, 2), "growth": 8, "classes": 10},
    ),
    "unet": Entry(
        "unet:UNet", "pixels", batch=4, size=256, sizes=range(16, 2**31, 16),
        small={"batch": 2, "image": 32, "width": 8},
    ),
    "gpt2": _gpt2(batch=8),
    "gpt2-medium": _gpt2(batch=16, layers=24, width=1024, heads=16),
    "gpt2-large": _gpt2(batch=4, layers=36, width=1280, heads=20),
    "gpt2-xl": _gpt2(batch=2, layers=48, width=1600, heads=25),
    "roberta-base": Entry(
        "roberta:Roberta", "text", batch=128, size=128, small=_SMALL_TRANSFORMER, optimizer="adamw"
    ),
    "lstm": Entry(
        "lstm:LSTM", "tokens", batch=20, size=35, small={"batch": 2, "seq": 12, "width": 32, "vocab": 256}
    ),
}  # fmt: skip
