"""The continuous-integration script, run on a repository whose tests are one line of ``make``."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / ".ci" / "run"


@pytest.fixture
def run(tmp_path: Path):
    """Run the script on a checkout named ``work``, with the recipe that a test gives to ``make test``."""
    if not shutil.which("git") or not shutil.which("make"):
        pytest.skip("needs git and make")
    checkout, temporary = tmp_path / "work", tmp_path / "temporary"
    (checkout / ".ci").mkdir(parents=True)
    temporary.mkdir()
    shutil.copy(SCRIPT, checkout / ".ci" / "run")
    (checkout / ".gitignore").write_text("ignored\n")
    (checkout / "ignored").touch()

    def go(recipe: str) -> tuple[subprocess.CompletedProcess[str], list[Path]]:
        (checkout / "Makefile").write_text(f"test:\n\t@{recipe}\n")
        for command in (["init", "--quiet"], ["add", "--all"]):
            subprocess.run(["git", *command], cwd=checkout, check=True)
        environment = {**os.environ, "TMPDIR": str(temporary)}
        done = subprocess.run([checkout / ".ci" / "run"], env=environment, capture_output=True, text=True)
        return done, list(temporary.iterdir())

    return go


def test_ci_tests_the_tracked_files_alone_in_a_folder_named_lowtide(run) -> None:
    done, left = run("basename $$PWD; ls -A; echo 3 passed in 1.00s")
    assert done.stdout.split("\n") == ["lowtide", ".ci", ".gitignore", "Makefile", "3 passed in 1.00s", ""]
    assert (done.returncode, left) == (0, [])


def test_ci_fails_where_the_tests_fail_and_leaves_no_copy(run) -> None:
    done, left = run("echo 1 failed; false")
    assert "1 failed" in done.stdout
    assert (done.returncode, left) == (2, [])
