"""CIFAR-10: 50,000 and 10,000 colour images of 32x32 pixels in ten classes (Krizhevsky, 2009)."""

from __future__ import annotations

import io
import json
import lzma
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from benchmarks.data.samples import Samples, Source, images, labels

CIFAR10 = Source(
    "CIFAR-10",
    download="cifar-10-python.tar.gz, the python version,",
    page="https://www.cs.toronto.edu/~kriz/cifar.html",
    layout="cifar-10-batches-py/ with data_batch_1 to data_batch_5 and test_batch, as tar unpacks it",
)

Pixels = NDArray[np.uint8]


def cifar10(folder: str | os.PathLike[str] | None = None) -> tuple[Samples, Samples]:
    """The training and the test images: (count, 3, 32, 32), labels 0 (airplane) to 9 (truck).

    Reads the python batches, without running code of a pickle, or all compact copies ``cifar10_*.impk`` in the order of
    their names. 740 MB as floats.
    """
    home = CIFAR10.folder(folder)
    for place in (home, home / "cifar-10-batches-py"):
        if (place / "data_batch_1").exists():
            parts = [_batch(place / f"data_batch_{number}") for number in range(1, 6)]
            return _samples(parts), _samples([_batch(place / "test_batch")])
    train: list[tuple[Pixels, Pixels]] = []
    test: list[tuple[Pixels, Pixels]] = []
    for path in sorted(home.glob("cifar10_*.impk")):
        with CIFAR10.reading(path, lzma.LZMAError, struct.error, TypeError):
            pixels, classes, count = _unpack(path)
        train.append((pixels[:count], classes[:count]))
        test.append((pixels[count:], classes[count:]))
    if not train:
        raise CIFAR10.missing(f"CIFAR-10 is not in {home}")
    return _samples(train), _samples(test)


def _samples(parts: list[tuple[Pixels, Pixels]]) -> Samples:
    pixels = np.concatenate([pixels for pixels, _ in parts])
    classes = np.concatenate([classes for _, classes in parts])
    return Samples(
        images(pixels, mean=[0.4914, 0.4822, 0.4465], std=[0.2470, 0.2435, 0.2616]), labels(classes, classes=10)
    )


# -- The python batches --------------------------------------------------------------------------------


def _batch(path: Path) -> tuple[Pixels, Pixels]:
    if not path.exists():
        raise CIFAR10.missing(f"{path.name} is not in {path.parent}")
    with CIFAR10.reading(path, pickle.UnpicklingError, AttributeError, TypeError):
        batch = _ArraysOnly(io.BytesIO(path.read_bytes()), encoding="latin1").load()
        pixels, classes = batch["data"], np.asarray(batch["labels"])
        return _checked(pixels.reshape(-1, 3, 32, 32), classes)


def _checked(pixels: Pixels, classes: NDArray[Any]) -> tuple[Pixels, Pixels]:
    if pixels.dtype != np.uint8 or pixels.shape[1:] != (3, 32, 32) or classes.shape != pixels.shape[:1]:
        raise ValueError(f"{pixels.dtype} images of shape {pixels.shape} with labels of shape {classes.shape}")
    labels(classes, classes=10)
    return pixels, classes.astype(np.uint8)


class _ArraysOnly(pickle.Unpickler):
    """Builds numpy arrays and what Python has literals for; any other name in a pickle is refused, not imported."""

    def find_class(self, module: str, name: str, /) -> object:
        # numpy 2 moved core to _core; the published batches name the old place.
        known: dict[tuple[str, str], object] = {
            ("numpy.core.multiarray", "_reconstruct"): _RECONSTRUCT,
            ("numpy._core.multiarray", "_reconstruct"): _RECONSTRUCT,
            ("numpy", "ndarray"): np.ndarray,
            ("numpy", "dtype"): np.dtype,
        }
        if (module, name) not in known:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return known[module, name]


_RECONSTRUCT = cast(Callable[..., object], np.empty(0).__reduce__()[0])


# -- Compact copies ------------------------------------------------------------------------------------


def _unpack(path: Path) -> tuple[Pixels, Pixels, int]:
    """Images, classes, and how many of them are for training.

    A header in JSON, then LZMA streams: the planes G, R - G and B - G, image after image, and the classes. Planes are
    stored as differences (modulo 256) from the prediction of JPEG-LS. Lossless.
    """
    with path.open("rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise ValueError("it does not start as a packed image file")
        (size,) = struct.unpack("<I", file.read(4))
        header = json.loads(file.read(size))
        count, height, width, channels = header["shape"]
        if channels != 3:
            raise ValueError(f"{channels} channels")
        green, red, blue = (
            _add_predictions(_stream(file, size).reshape(count, height, width)) for size in header["img"]
        )
        arrays = {name: _stream(file, size).reshape(shape) for name, shape, size in header["arr"]}
    pixels, classes = _checked(np.stack([red + green, green, blue + green], axis=1), arrays["y"])
    return pixels, classes, int(header["meta"]["n_train"])


def _stream(file: BinaryIO, size: int) -> Pixels:
    return np.frombuffer(lzma.decompress(file.read(size), lzma.FORMAT_RAW, filters=_FILTERS), np.uint8)


def _add_predictions(differences: Pixels) -> Pixels:
    """Undo the median edge predictor of JPEG-LS, for all images at once: median(left, above, left + above - corner)."""
    height, width = differences.shape[1:]
    plane = differences.transpose(1, 2, 0).copy()  # images last: each step below is over contiguous memory
    for x in range(1, width):
        plane[0, x] += plane[0, x - 1]
    for y in range(1, height):
        plane[y, 0] += plane[y - 1, 0]
        for x in range(1, width):
            left, above, corner = (plane[at].astype(np.int16) for at in ((y, x - 1), (y - 1, x), (y - 1, x - 1)))
            low, high = np.minimum(left, above), np.maximum(left, above)
            plane[y, x] += np.clip(left + above - corner, low, high).astype(np.uint8)
    return plane.transpose(2, 0, 1)


_MAGIC = b"IMPK1\n"
_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9, "lc": 4, "lp": 0, "pb": 0}]
