"""A folder with a workload."""

from __future__ import annotations

from pathlib import Path

import pytest

from .running import DEEP


@pytest.fixture
def deep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A file with a workload, in the current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "deep.py").write_text(DEEP)
    return "deep.py:workload"
