"""Registries: names without imports, implementations on demand, registered ones until the undo."""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from lowtide.errors import PlanError
from lowtide.registry import BUILT_IN, BuiltIn, Registry
from tests.refusals import refused


@dataclass
class Toy:
    name: str = "toy"


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry[Toy]:
    built_in = {"built in": BuiltIn(f"{__name__}:Toy", ""), "absent": BuiltIn("lowtide.no_such_module:Toy", "")}
    monkeypatch.setattr("lowtide.registry.BUILT_IN", {"toy": built_in})
    return Registry("toy")


def test_a_built_in_is_imported_when_it_is_first_used(registry: Registry[Toy]) -> None:
    assert list(registry) == ["built in", "absent"]
    assert registry["built in"] is registry["built in"]
    with pytest.raises(ModuleNotFoundError):
        registry["absent"]
    assert "lowtide.no_such_module" not in sys.modules


def test_an_unknown_name_is_refused_with_those_that_are_known(registry: Registry[Toy]) -> None:
    with pytest.raises(PlanError) as error:
        registry["three"]
    assert all(name in str(error.value) for name in ("three", *registry))


def test_a_registered_one_is_known_until_the_undo_and_names_are_unique(registry: Registry[Toy]) -> None:
    with registry.register(toy := Toy()):
        assert registry["toy"] is toy
        assert list(registry)[-1] == "toy"
        with refused("'toy'", kind=PlanError):
            registry.register(Toy())
    assert "toy" not in registry


SOURCE = Path(__file__).resolve().parents[1] / "src" / "lowtide"
PLACES = {built_in.place.partition(":")[0] for names in BUILT_IN.values() for built_in in names.values()}


def importers(module: str) -> Iterator[str]:
    """Folders of the files that import a module, other than its own."""
    own = SOURCE.parent / module.replace(".", "/")
    for path in SOURCE.rglob("*.py"):
        found = (node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.ImportFrom))
        names = {each for node in found for each in (node.module, *(f"{node.module}.{a.name}" for a in node.names))}
        if module in names and path.parent != own.parent:
            yield str(path.relative_to(SOURCE))


@pytest.mark.parametrize("module", sorted(PLACES))
def test_a_built_in_is_imported_by_its_registry_and_its_neighbours_alone(module: str) -> None:
    assert list(importers(module)) == []


def test_an_importer_is_found() -> None:
    assert "planning/search.py" in importers("lowtide.registry")


@pytest.mark.parametrize(("contract", "name"), [(key, name) for key, names in BUILT_IN.items() for name in names])
def test_every_built_in_has_the_name_that_it_is_listed_under(contract: str, name: str) -> None:
    assert Registry(contract)[name].name == name
