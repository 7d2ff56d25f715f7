"""A batch as tokenizers of Transformers give it."""

from __future__ import annotations

from collections import UserDict
from typing import Any


class Encoding(UserDict[str, Any]):
    """Items are attributes too, and there is more than items."""

    def __init__(self, data: dict[str, Any], encodings: list[str] | None = None) -> None:
        super().__init__(data)
        self.encodings = encodings

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["data"][name]
        except KeyError:
            raise AttributeError(name) from None
