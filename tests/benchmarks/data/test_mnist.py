from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.refusals import refused

from benchmarks.data import mnist

FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
PIXELS = np.random.default_rng(0).integers(0, 256, (7, 28, 28), dtype=np.uint8)
DIGITS = np.array([5, 0, 4, 1, 9, 2, 1], dtype=np.uint8)


def idx(array: np.ndarray) -> bytes:
    return bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def publish(folder: Path, *, zipped: bool = False) -> Path:
    """Five training digits and two test digits, as the page has them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in zip(FILES, (PIXELS[:5], DIGITS[:5], PIXELS[5:], DIGITS[5:]), strict=True):
        (folder / (f"{name}.gz" if zipped else name)).write_bytes(gzip.compress(idx(array)) if zipped else idx(array))
    return folder


def expected(pixels: np.ndarray) -> torch.Tensor:
    return ((torch.from_numpy(pixels.copy()).double()[:, None] / 255 - 0.1307) / 0.3081).float()


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("place", ["", "mnist", "MNIST/raw"])
def test_idx_files_are_read_in_order(tmp_path: Path, zipped: bool, place: str):
    publish(tmp_path / place, zipped=zipped)
    (images, labels), test = mnist(tmp_path)
    assert images.dtype == torch.float32
    assert labels.dtype == torch.int64
    torch.testing.assert_close(images, expected(PIXELS[:5]))
    torch.testing.assert_close(test.inputs, expected(PIXELS[5:]))
    assert labels.tolist() == [5, 0, 4, 1, 9]
    assert test.labels.tolist() == [2, 1]


def test_one_packed_file_gives_the_same(tmp_path: Path):
    arrays = {"x_train": PIXELS[:5], "y_train": DIGITS[:5], "x_test": PIXELS[5:], "y_test": DIGITS[5:]}
    np.savez(tmp_path / "mnist.npz", **arrays)
    packed, published = mnist(tmp_path), mnist(publish(tmp_path / "idx"))
    for mine, theirs in zip(packed, published, strict=True):
        assert torch.equal(mine.inputs, theirs.inputs)
        assert torch.equal(mine.labels, theirs.labels)


def test_the_folder_may_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LOWTIDE_DATA", str(publish(tmp_path)))
    assert len(mnist()[0].labels) == 5


@pytest.mark.parametrize("name", FILES[1:])
def test_a_missing_file_is_named(tmp_path: Path, name: str):
    (publish(tmp_path) / name).unlink()
    with refused(name):
        mnist(tmp_path)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "idx"),
        (b"<html>not found</html>", "idx"),
        (idx(DIGITS), "3 dimensions"),
        (idx(PIXELS[:5])[:-1], "3919 bytes"),
        (idx(PIXELS[:5]) + b"x", "3921 bytes"),
        (idx(PIXELS[:4]), "(4, 28, 28) with 5 labels"),
        (idx(PIXELS[:5, :27]), "(5, 27, 28) with 5 labels"),
    ],
)
def test_a_damaged_idx_file_is_refused(tmp_path: Path, content: bytes, why: str):
    (publish(tmp_path) / FILES[0]).write_bytes(content)
    with refused(FILES[0], "MNIST", why, "Download"):
        mnist(tmp_path)


def test_labels_that_are_no_digits_are_refused(tmp_path: Path):
    (publish(tmp_path) / FILES[1]).write_bytes(idx(DIGITS[:5] + 6))
    with refused("6 to 15"):
        mnist(tmp_path)


@pytest.mark.parametrize("cut", [0, 5, 40])
def test_a_truncated_archive_is_refused(tmp_path: Path, cut: int):
    path = publish(tmp_path, zipped=True) / f"{FILES[0]}.gz"
    path.write_bytes(path.read_bytes()[:cut])
    with refused(path.name, "MNIST"):
        mnist(tmp_path)


@pytest.mark.parametrize("content", [b"", b"not a zip", b"PK\x03\x04 cut"])
def test_a_damaged_packed_file_is_refused(tmp_path: Path, content: bytes):
    (tmp_path / "mnist.npz").write_bytes(content)
    with refused("mnist.npz", "MNIST"):
        mnist(tmp_path)
    np.savez(tmp_path / "mnist.npz", x_train=PIXELS)
    with refused("y_train"):
        mnist(tmp_path)
