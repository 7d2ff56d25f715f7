"""Registries: names without imports, implementations on demand, registered ones until the undo."""

import sys
from dataclasses import dataclass

import pytest

from lowtide.errors import PlanError
from lowtide.registry import Registry


@dataclass
class Toy:
    name: str = "toy"


def test_a_built_in_is_imported_when_it_is_first_used() -> None:
    registry: Registry[Toy] = Registry("toy", {"built in": f"{__name__}:Toy", "absent": "lowtide.no_such_module:Toy"})
    assert list(registry) == ["built in", "absent"]
    assert registry["built in"] is registry["built in"]
    with pytest.raises(ModuleNotFoundError):
        registry["absent"]
    assert "lowtide.no_such_module" not in sys.modules


def test_an_unknown_name_is_refused_with_those_that_are_known() -> None:
    registry: Registry[Toy] = Registry("toy", {"one": "x:Y", "two": "x:Y"})
    with pytest.raises(PlanError, match=r"three.*one, two"):
        registry["three"]


def test_a_registered_one_is_known_until_the_undo_and_names_are_unique() -> None:
    registry: Registry[Toy] = Registry("toy", {})
    with registry.register(toy := Toy()):
        assert registry["toy"] is toy
        assert registry.values() == [toy]
        with pytest.raises(PlanError, match="toy"):
            registry.register(Toy())
    assert "toy" not in registry
