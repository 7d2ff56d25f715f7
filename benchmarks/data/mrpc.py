"""MRPC: pairs of sentences, and whether they say the same (Dolan and Brockett, 2005), in the parts of GLUE."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
from torch import Tensor

from benchmarks.data.samples import Source, labels

MRPC = Source(
    "MRPC",
    download="train.tsv and dev.tsv of MRPC",
    page="https://gluebenchmark.com/tasks",
    layout="them in it, in MRPC/ or in glue_data/MRPC/",
)


class Pairs(NamedTuple):
    """Sentences two by two, and 1 (int64) where they say the same, in the order of the file."""

    first: list[str]
    second: list[str]
    labels: Tensor


def mrpc(folder: str | os.PathLike[str] | None = None) -> tuple[Pairs, Pairs]:
    """The 3,668 training and the 408 validation pairs of GLUE.

    Reads GLUE's ``train.tsv`` and ``dev.tsv``, or one ``mrpc_train.tsv`` whose column glue_split marks both parts.
    """
    home = MRPC.folder(folder)
    if (both := home / "mrpc_train.tsv").exists():
        return _read(both, part="train"), _read(both, part="dev")
    for place in (home / "MRPC", home / "glue_data" / "MRPC", home):
        if (place / "train.tsv").exists():
            if not (place / "dev.tsv").exists():
                raise MRPC.missing(f"dev.tsv is not in {place}")
            return _read(place / "train.tsv"), _read(place / "dev.tsv")
    raise MRPC.missing(f"MRPC is not in {home}")


def _read(path: Path, *, part: str | None = None) -> Pairs:
    with MRPC.reading(path):
        # Not the csv module: a quotation mark is part of a sentence. GLUE's files start with a byte order mark.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
        columns = _columns(lines[0].rstrip("\r").split("\t"))
        pairs: list[tuple[str, str, int]] = []
        for number, line in enumerate(lines[1:], start=2):
            if not line.strip():
                continue
            cells = line.rstrip("\r").split("\t")
            if len(cells) <= max(columns.values()):
                raise ValueError(f"line {number} has {len(cells)} columns")
            if part is None or cells[columns["glue_split"]] == part:
                pairs.append((cells[columns["first"]], cells[columns["second"]], int(cells[columns["label"]])))
        if not pairs:
            raise ValueError(f"there are no pairs of the part {part!r}" if part else "there are no pairs")
        answers = labels(np.array([answer for *_, answer in pairs]), classes=2)
    return Pairs([first for first, *_ in pairs], [second for _, second, _ in pairs], answers)


def _columns(header: list[str]) -> dict[str, int]:
    """Find each column, by GLUE's names or plain ones."""
    if header[:1] == ["index"]:
        raise ValueError("it is GLUE's test part, which has no labels")
    names = {
        "Quality": "label",
        "#1 String": "first",
        "#2 String": "second",
        "sentence1": "first",
        "sentence2": "second",
    }
    places = {names.get(name, name): place for place, name in enumerate(header)}
    for needed in ("label", "first", "second"):
        if needed not in places:
            raise ValueError(f"its columns are {', '.join(header)}")
    return {name: place for name, place in places.items() if name in ("label", "first", "second", "glue_split")}
