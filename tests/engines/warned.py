"""Warnings that name the cause, whatever the sentence around it."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import pytest


@contextmanager
def warned(*words: str) -> Generator[pytest.WarningsRecorder]:
    """Expect a ``RuntimeWarning`` whose message holds all of these words."""
    with pytest.warns(RuntimeWarning) as caught:
        yield caught
    assert any(all(word in str(each.message) for word in words) for each in caught)
