"""MNIST: 60,000 and 10,000 handwritten digits of 28x28 pixels (LeCun, Cortes and Burges)."""

from __future__ import annotations

import gzip
import math
import os
import zipfile
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.data.samples import Samples, Source, images, labels

MNIST = Source(
    "MNIST",
    download="the four files train-images-idx3-ubyte.gz, train-labels-idx1-ubyte.gz, t10k-images-idx3-ubyte.gz and "
    "t10k-labels-idx1-ubyte.gz",
    page="https://yann.lecun.com/exdb/mnist/ (or its mirror https://ossci-datasets.s3.amazonaws.com/mnist/)",
    layout="them in it, in mnist/ or in MNIST/raw/, as they are or unpacked",
)


def mnist(folder: str | os.PathLike[str] | None = None) -> tuple[Samples, Samples]:
    """The training and the test digits: images (count, 1, 28, 28), labels 0 to 9.

    Reads the idx files, with or without ``.gz``, or ``mnist.npz`` with x_train, y_train, x_test and y_test.
    """
    home = MNIST.folder(folder)
    for place in (home, home / "mnist", home / "MNIST" / "raw"):
        if _idx(place, "train-images-idx3-ubyte"):
            return _read(place, "train"), _read(place, "t10k")
    if (packed := home / "mnist.npz").exists():
        with MNIST.reading(packed, zipfile.BadZipFile, zlib.error), packed.open("rb") as file, np.load(file) as arrays:
            return (
                _samples(arrays["x_train"], arrays["y_train"]),
                _samples(arrays["x_test"], arrays["y_test"]),
            )
    raise MNIST.missing(f"MNIST is not in {home}")


def _read(place: Path, part: str) -> Samples:
    read: list[NDArray[np.uint8]] = []
    for name, dims in ((f"{part}-images-idx3-ubyte", 3), (f"{part}-labels-idx1-ubyte", 1)):
        path = _idx(place, name)
        if path is None:
            raise MNIST.missing(f"{name} is not in {place}")
        with MNIST.reading(path, zlib.error):
            read.append(_array(path, dims))
    with MNIST.reading(place / f"{part}-labels-idx1-ubyte"):
        return _samples(*read)


def _idx(place: Path, name: str) -> Path | None:
    return next((path for path in (place / name, place / f"{name}.gz") if path.exists()), None)


def _array(path: Path, dims: int) -> NDArray[np.uint8]:
    """An idx file: two zero bytes, the type (8: unsigned bytes), the dimensions; their sizes, big-endian; the data."""
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    start = 4 + 4 * dims
    if content[:4] != bytes((0, 0, 8, dims)) or len(content) < start:
        raise ValueError(f"it does not start as an idx file of bytes in {dims} dimensions")
    shape = tuple(int(size) for size in np.frombuffer(content, ">u4", count=dims, offset=4))
    if len(content) - start != math.prod(shape):
        raise ValueError(f"it has {len(content) - start} bytes for {' x '.join(map(str, shape))}")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def _samples(pixels: NDArray[np.uint8], digits: NDArray[np.uint8]) -> Samples:
    if pixels.shape != (len(digits), 28, 28) or pixels.dtype != np.uint8:
        raise ValueError(f"{pixels.dtype} images of shape {pixels.shape} with {len(digits)} labels")
    # A copy, since the bytes of a file cannot be written to.
    return Samples(images(pixels[:, None].copy(), mean=[0.1307], std=[0.3081]), labels(digits, classes=10))
