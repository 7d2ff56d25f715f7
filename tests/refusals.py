"""Errors and warnings that name the cause, whatever the sentence around it."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import pytest

from lowtide.errors import LowtideError


@contextmanager
def refused(*words: str, kind: type[Exception] = LowtideError) -> Generator[None]:
    """Expect an error of a kind whose message holds all of these words."""
    with pytest.raises(kind) as caught:
        yield
    for word in words:
        assert word in str(caught.value)


@contextmanager
def warned(*words: str) -> Generator[pytest.WarningsRecorder]:
    """Expect a ``RuntimeWarning`` whose message holds all of these words."""
    with pytest.warns(RuntimeWarning) as caught:
        yield caught
    assert any(all(word in str(each.message) for word in words) for each in caught)
