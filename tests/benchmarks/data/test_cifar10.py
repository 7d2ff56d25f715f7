from __future__ import annotations

import json
import lzma
import os
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.refusals import refused

from benchmarks.data import cifar10

PIXELS = np.random.default_rng(0).integers(0, 256, (12, 3, 32, 32), dtype=np.uint8)
CLASSES = np.arange(12, dtype=np.uint8) % 10
NAMES = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")


def python2_batch(pixels: np.ndarray, classes: np.ndarray) -> bytes:
    """A batch in the bytes that Python 2 wrote: protocol 2, byte strings, numpy's old names."""

    def string(value: bytes) -> bytes:
        return b"T" + struct.pack("<i", len(value)) + value

    rows = pixels.reshape(len(pixels), -1)
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85" + string(b"b") + b"tR(K\x01"
        b"K" + bytes([rows.shape[0]]) + b"M" + struct.pack("<H", rows.shape[1]) + b"\x86"
        b"cnumpy\ndtype\n(" + string(b"u1") + b"K\x00K\x01tR(K\x03" + string(b"|") + b"NNN"
        b"J\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89" + string(rows.tobytes()) + b"tb"
    )
    numbers = b"](" + b"".join(b"K" + bytes([value]) for value in classes) + b"e"
    items = string(b"batch_label") + string(b"batch 1 of 5") + string(b"labels") + numbers + string(b"data") + array
    return b"\x80\x02}(" + items + b"u."


def publish(folder: Path) -> Path:
    """Two images in each batch, as the archive unpacks."""
    place = folder / "cifar-10-batches-py"
    place.mkdir()
    for index, name in enumerate(NAMES):
        part = slice(2 * index, 2 * index + 2)
        (place / name).write_bytes(python2_batch(PIXELS[part], CLASSES[part]))
    return place


def packed(pixels: np.ndarray, classes: np.ndarray, train: int) -> bytes:
    """A compact file, with the predictor written out pixel by pixel."""
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9, "lc": 4, "lp": 0, "pb": 0}]
    red, green, blue = (pixels[:, channel].astype(int) for channel in range(3))
    streams: list[bytes] = []
    for plane in (green, (red - green) % 256, (blue - green) % 256):
        differences = np.zeros(plane.shape, np.uint8)
        for image, y, x in np.ndindex(plane.shape):
            left, above = plane[image, y, x - 1], plane[image, y - 1, x]
            if y and x:
                guess = sorted((left, above, left + above - plane[image, y - 1, x - 1]))[1]
            else:
                guess = left if x else above if y else 0
            differences[image, y, x] = (plane[image, y, x] - guess) % 256
        streams.append(lzma.compress(differences.tobytes(), lzma.FORMAT_RAW, filters=filters))
    labels = lzma.compress(classes.tobytes(), lzma.FORMAT_RAW, filters=filters)
    header = {
        "shape": [len(pixels), 32, 32, 3],
        "img": [len(stream) for stream in streams],
        "arr": [["y", [len(classes)], len(labels)]],
        "meta": {"n_train": train},
    }
    text = json.dumps(header).encode()
    return b"IMPK1\n" + struct.pack("<I", len(text)) + text + b"".join(streams) + labels


def pixels_of(images: torch.Tensor) -> np.ndarray:
    mean, std = np.array([0.4914, 0.4822, 0.4465]), np.array([0.2470, 0.2435, 0.2616])
    return np.round((images.numpy() * std[:, None, None] + mean[:, None, None]) * 255).astype(np.uint8)


@pytest.mark.parametrize("inside", [False, True])
def test_python_batches_are_read_in_order(tmp_path: Path, inside: bool):
    place = publish(tmp_path)
    train, test = cifar10(place if inside else tmp_path)
    assert train.inputs.dtype == torch.float32
    assert train.labels.dtype == torch.int64
    assert np.array_equal(pixels_of(train.inputs), PIXELS[:10])
    assert np.array_equal(pixels_of(test.inputs), PIXELS[10:])
    assert train.labels.tolist() == list(range(10))
    assert test.labels.tolist() == [0, 1]


@pytest.mark.parametrize("protocol", [3, 4])
def test_batches_that_were_pickled_again_are_read_too(tmp_path: Path, protocol: int):
    place = publish(tmp_path)
    again = {"data": PIXELS[10:].reshape(2, -1), "labels": [3, 4]}
    (place / "test_batch").write_bytes(pickle.dumps(again, protocol=protocol))
    assert cifar10(tmp_path)[1].labels.tolist() == [3, 4]


def test_compact_files_are_read_together_and_alone(tmp_path: Path):
    (tmp_path / "cifar10_b.impk").write_bytes(packed(PIXELS[6:], CLASSES[6:], train=4))
    train, test = cifar10(tmp_path)
    assert np.array_equal(pixels_of(train.inputs), PIXELS[6:10])
    assert np.array_equal(pixels_of(test.inputs), PIXELS[10:])
    (tmp_path / "cifar10_a.impk").write_bytes(packed(PIXELS[:6], CLASSES[:6], train=6))
    train, test = cifar10(tmp_path)
    assert np.array_equal(pixels_of(train.inputs), PIXELS[:10])
    assert train.labels.tolist() == list(range(10))
    assert test.labels.tolist() == [0, 1]


class Harm:
    def __reduce__(self):
        return os.mkdir, ("harm",)


def test_a_pickle_cannot_run_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (publish(tmp_path) / "data_batch_3").write_bytes(pickle.dumps({"data": Harm(), "labels": []}))
    with refused("data_batch_3", "CIFAR-10", "mkdir"):
        cifar10(tmp_path)
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not a pickle",
        pickle.dumps({"labels": [1]}),
        pickle.dumps([1, 2]),
        pickle.dumps({"data": "words", "labels": [1]}),
        python2_batch(PIXELS[:2], CLASSES[:2])[:-50],
        python2_batch(PIXELS[:2], CLASSES[:1]),
        python2_batch(PIXELS[:2], CLASSES[:2] + 9),
        python2_batch(PIXELS[:2, :, :31], CLASSES[:2]),
    ],
)
def test_a_damaged_batch_is_refused(tmp_path: Path, content: bytes):
    (publish(tmp_path) / "data_batch_2").write_bytes(content)
    with refused("data_batch_2", "CIFAR-10"):
        cifar10(tmp_path)


@pytest.mark.parametrize("cut", [0, 3, 8, 40, 300, -10])
def test_a_damaged_compact_file_is_refused(tmp_path: Path, cut: int):
    (tmp_path / "cifar10_a.impk").write_bytes(packed(PIXELS[:2], CLASSES[:2], train=1)[:cut])
    with refused("cifar10_a.impk", "CIFAR-10"):
        cifar10(tmp_path)


def test_a_missing_batch_is_named(tmp_path: Path):
    (publish(tmp_path) / "test_batch").unlink()
    with refused("test_batch"):
        cifar10(tmp_path)
