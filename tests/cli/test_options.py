"""Options that commands share: how errors are shown, and help without torch."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from .running import ROOT, lowtide


def test_the_version_and_the_help_are_there() -> None:
    from lowtide import __version__

    assert lowtide("--version").out == f"lowtide {__version__}\n"
    for name in ("profile", "plan", "train", "verify", "bench", "demo"):
        assert "--json" in lowtide(name, "--help").out


def test_a_traceback_is_shown_where_asked(deep: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = "deep.py:wrong"
    assert "ValueError: first line second line" in lowtide("profile", target, code=2).err
    assert "Traceback" in lowtide("profile", target, "--traceback", code=2).err
    monkeypatch.setenv("LOWTIDE_DEBUG", "1")
    assert "Traceback" in lowtide("profile", target, code=2).err


def test_without_the_extra_it_says_how_to_install_it() -> None:
    done = fresh("sys.modules['typer'] = None")
    assert done.returncode == 2
    assert done.stderr == (
        'error: This needs typer, which is not installed. Install it with: pip install "lowtide[cli]"\n'
    )


def test_help_needs_no_torch() -> None:
    done = fresh("sys.modules['torch'] = None; sys.argv = ['lowtide', '--help']")
    assert done.returncode == 0, done.stderr
    assert "profile" in done.stdout


def fresh(before: str) -> subprocess.CompletedProcess[str]:
    """The command line in an interpreter of its own."""
    return subprocess.run(
        [sys.executable, "-c", f"import sys; {before}; from lowtide.cli import main; main()"],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
