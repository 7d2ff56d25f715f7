"""A target that cannot be loaded, and the words that its error must have."""

from __future__ import annotations

from typing import Any

from lowtide.errors import WorkloadError
from lowtide.loading import load
from tests.refusals import refused


def fails(target: str, *words: str, **settings: Any) -> None:
    with refused(*words, kind=WorkloadError):
        load(target, **settings)
