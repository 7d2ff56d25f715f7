from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lowtide.errors import LowtideError
from lowtide.techniques import register, registry, techniques
from lowtide.techniques.sqrt import Sqrt
from tests.refusals import refused

SOURCE = Path(__file__).parents[2] / "src"

MODULE = """
from lowtide.techniques.sqrt import Sqrt

class Mine(Sqrt):
    name = "mine"

class NotOne:
    name = "half"
"""


@pytest.fixture
def offer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """Install a package that offers some entry points."""

    def install(points: str) -> None:
        (tmp_path / "offered.py").write_text(MODULE)
        info = tmp_path / "offered-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: offered\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[lowtide.techniques]\n{points}\n")
        monkeypatch.syspath_prepend(tmp_path)
        registry._installed.cache_clear()

    yield install
    registry._installed.cache_clear()
    sys.modules.pop("offered", None)


def test_an_installed_package_adds_its_technique(offer) -> None:
    offer("mine = offered:Mine")
    assert techniques()["mine"].name == "mine"
    assert "sqrt" in techniques()


@pytest.mark.parametrize("point", ["offered:Missing", "no_such_module:Mine", "offered:NotOne"])
def test_a_broken_entry_point_is_named_and_passed_over(offer, point: str) -> None:
    offer(f"broken = {point}")
    with pytest.warns(RuntimeWarning) as warned:
        assert "sqrt" in techniques()
    assert f"'broken' ({point})" in str(warned[0].message)


def test_built_in_techniques_that_are_gone_stay_gone_after_an_older_installation(offer) -> None:
    offer("gone = lowtide.techniques.no_such_module:Gone")
    assert len(techniques()) == len(registry.BUILT_IN)


def test_two_techniques_of_one_name_are_an_error_that_names_both(offer) -> None:
    offer("again = lowtide.techniques.sqrt:Sqrt\nother = offered:Mine")
    assert len(techniques()) == len(registry.BUILT_IN) + 1  # the same technique under two entries is one
    with pytest.raises(LowtideError) as refusal:
        register(techniques()["mine"])
    assert "offered.Mine" in str(refusal.value)


def test_a_registered_technique_is_there_until_it_is_undone() -> None:
    class Other(Sqrt):
        name = "other"

    with register(Other()):
        assert "other" in techniques()
    assert "other" not in techniques()


@pytest.mark.parametrize(("name", "value"), [("kind", "layer"), ("conflicts", frozenset({"sqrt"})), ("config", dict)])
def test_a_technique_of_another_shape_is_refused_with_what_it_should_be(name: str, value: object) -> None:
    technique = Sqrt()
    technique.name = "mine"
    setattr(technique, name, value)
    with refused(f"{name}="):
        register(technique)
    with refused("object object", "conflicts"):
        register(object())


def test_built_ins_are_found_without_an_installation(tmp_path: Path) -> None:
    script = f"""
import importlib.metadata, sys
sys.path.insert(0, {str(SOURCE)!r})
importlib.metadata.entry_points = lambda **_: ()  # those of an installation, wherever it is
import lowtide.techniques
print(*lowtide.techniques.techniques())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=tmp_path)
    actual = done.stdout.split()
    assert actual[:3] == ["sqrt", "optimal", "batchnorm"]
    assert len(actual) == len(registry.BUILT_IN)
