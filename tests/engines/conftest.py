"""What tests of engines share: compiled graphs of their own, and a planned step in which all is awkward."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

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
