from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.refusals import refused

from benchmarks.data import mrpc

HEADER = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"
TRAIN = ['1\t7\t8\tHe said " no " .\tHe said no .', "0\t9\t10\tTwo of us left .\tNo one left ."]
DEV = ["1\t11\t12\tShares rose 4.4 % .\tShares were up 4.4 % ."]


def publish(folder: Path, *, train: list[str] = TRAIN, dev: list[str] = DEV, end: str = "\n") -> Path:
    """As GLUE's download has it: a byte order mark, no quoting."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in (("train.tsv", train), ("dev.tsv", dev)):
        (folder / name).write_bytes(("\ufeff" + end.join([HEADER, *lines]) + end).encode())
    return folder


def test_pairs_and_labels_are_read_in_order(tmp_path: Path):
    train, dev = mrpc(publish(tmp_path))
    assert train.first == ['He said " no " .', "Two of us left ."]
    assert train.second == ["He said no .", "No one left ."]
    assert train.labels.tolist() == [1, 0]
    assert train.labels.dtype == torch.int64
    assert (dev.first, dev.second, dev.labels.tolist()) == (["Shares rose 4.4 % ."], ["Shares were up 4.4 % ."], [1])


@pytest.mark.parametrize("place", ["MRPC", "glue_data/MRPC"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_folders_of_the_download_and_windows_lines_are_known(tmp_path: Path, place: str, end: str):
    publish(tmp_path / place, end=end)
    train, _ = mrpc(tmp_path)
    assert train.second == ["He said no .", "No one left ."]


def test_the_folder_may_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LOWTIDE_DATA", str(publish(tmp_path)))
    assert mrpc()[0].labels.tolist() == [1, 0]


def test_one_file_that_marks_both_parts_gives_the_same(tmp_path: Path):
    marked = [f"{line}\t{part}" for part, lines in (("train", TRAIN), ("dev", DEV)) for line in lines]
    header = "label\tid1\tid2\tsentence1\tsentence2\tglue_split"
    (tmp_path / "mrpc_train.tsv").write_text("\n".join([header, *reversed(marked)]), encoding="utf-8")
    (marked_train, marked_dev), (train, dev) = mrpc(tmp_path), mrpc(publish(tmp_path / "glue"))
    assert (marked_train.first[::-1], marked_train.second[::-1]) == (train.first, train.second)
    assert marked_train.labels.flip(0).tolist() == train.labels.tolist()
    assert (marked_dev.first, marked_dev.second) == (dev.first, dev.second)


def test_a_missing_part_is_named(tmp_path: Path):
    (publish(tmp_path) / "dev.tsv").unlink()
    with refused("dev.tsv"):
        mrpc(tmp_path)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", "columns"),
        ("sentence\tlabel\na fine film\t1\n", "sentence, label"),
        (f"{HEADER}\n", "no pairs"),
        (f"{HEADER}\n1\t7\t8\tcut off\n", "line 2"),
        (f"{HEADER}\nyes\t7\t8\ta\tb\n", "yes"),
        (f"{HEADER}\n2\t7\t8\ta\tb\n", "2 to 2"),
        ("index\t#1 ID\t#2 ID\t#1 String\t#2 String\n0\t7\t8\ta\tb\n", "test part"),
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path: Path, content: str, why: str):
    (publish(tmp_path) / "train.tsv").write_text(content, encoding="utf-8")
    with refused("train.tsv", "MRPC", why, "Download"):
        mrpc(tmp_path)


def test_a_file_that_is_not_text_is_refused(tmp_path: Path):
    (publish(tmp_path) / "dev.tsv").write_bytes(b"\xff\xfe\x00\x81")
    with refused("dev.tsv", "MRPC"):
        mrpc(tmp_path)
