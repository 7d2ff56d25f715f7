"""Expect errors by what they name, not by their wording."""

from collections.abc import Generator
from contextlib import contextmanager

import pytest


@contextmanager
def raises(error: type[BaseException] | tuple[type[BaseException], ...], *names: str) -> Generator[None]:
    """Expect an error whose message holds each of these names, values or numbers."""
    with pytest.raises(error) as caught:
        yield
    assert all(name in str(caught.value) for name in names), str(caught.value)
