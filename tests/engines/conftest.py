"""Fixtures of engine tests: compiled graphs of their own, and a planned step in which all is awkward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lowtide.engines import graph as graph_module
from lowtide.engines import shapes as shapes_module

from .counting import count_calls
from .planned import Ready, awkward, planned


@pytest.fixture(autouse=True, scope="module")
def _fresh() -> Iterator[None]:
    """No file's graphs are another's."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def ready() -> Ready:
    return planned(awkward())


@pytest.fixture
def predictions(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Grows with each step that is predicted."""
    return count_calls(monkeypatch, shapes_module, "profile")


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Grows with each graph that is captured for a program."""
    return count_calls(monkeypatch, graph_module._Backend, "__call__")
