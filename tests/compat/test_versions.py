"""Features that could silently be wrong are off on versions that nobody has seen."""

from __future__ import annotations

import pytest
import torch

from lowtide.compat.versions import PYTHON, TORCH, is_seen, require_seen
from lowtide.errors import LowtideError, TraceError


def test_this_version_is_seen() -> None:
    assert is_seen()
    require_seen("this")


@pytest.mark.parametrize(("version", "seen"), [("2.10.1", False), ("2.11.0+cu128", True), ("2.14.0.dev2026", False)])
def test_versions_of_torch_outside_of_the_range_are_not_seen(
    version: str, seen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    assert is_seen() == seen


def test_versions_of_python_outside_of_the_range_are_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowtide.compat.versions.sys.version_info", (PYTHON[1][0], PYTHON[1][1] + 1, 0))
    assert not is_seen()


def test_a_feature_outside_of_the_range_says_that_it_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", f"{TORCH[1][0]}.{TORCH[1][1] + 1}.0")
    with pytest.raises(LowtideError, match="painting by numbers"):
        require_seen("painting by numbers")
    with pytest.raises(TraceError):
        require_seen("painting by numbers", TraceError)
