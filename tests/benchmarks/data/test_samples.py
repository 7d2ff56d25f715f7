"""Promises of every data set: it is found in the usual places, and a missing one says what to download."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.refusals import refused

from benchmarks.data import cifar10, mnist, mrpc, speech_commands

DOWNLOADS = {
    cifar10: ("cifar-10-python.tar.gz", "toronto.edu", "cifar-10-batches-py"),
    mnist: ("train-images-idx3-ubyte.gz", "yann.lecun.com", "MNIST/raw"),
    mrpc: ("train.tsv", "gluebenchmark.com", "MRPC/"),
    speech_commands: ("speech_commands_v0.02.tar.gz", "tensorflow.org", "testing_list.txt"),
}


@pytest.mark.parametrize("load", DOWNLOADS)
@pytest.mark.parametrize("folder", [None, "", "nowhere", "."])
def test_a_missing_data_set_says_what_to_download_and_from_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load: Any, folder: str | None
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LOWTIDE_DATA", raising=False)
    with refused(*DOWNLOADS[load], "LOWTIDE_DATA"):
        load(folder)
