"""The words that an error for a target must have."""

from __future__ import annotations

from typing import Any

import pytest

from lowtide.errors import WorkloadError
from lowtide.loading import load


def fails(target: str, *words: str, **settings: Any) -> None:
    with pytest.raises(WorkloadError) as caught:
        load(target, **settings)
    assert all(word in str(caught.value) for word in words), caught.value
