"""The version has one home."""

from __future__ import annotations

import re
from pathlib import Path

import lowtide
from lowtide.version import __version__


def test_the_version_is_a_release_number_and_the_front_doors():
    assert re.fullmatch(r"\d+\.\d+\.\d+", __version__)
    assert lowtide.__version__ == __version__
    changes = (Path(__file__).resolve().parents[1] / "CHANGELOG.md").read_text(encoding="utf-8")
    assert __version__ in changes
