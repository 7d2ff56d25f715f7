"""The versions of torch and Python on which these private names were seen."""

from __future__ import annotations

import sys

import torch

from lowtide.errors import LowtideError

TORCH = ((2, 11), (2, 13))
"""The first and the last version of torch."""

PYTHON = ((3, 11), (3, 12))
"""The first and the last version of Python."""


def is_seen() -> bool:
    """Tell whether this torch and this Python are among the versions seen."""
    return TORCH[0] <= _torch_version() <= TORCH[1] and PYTHON[0] <= sys.version_info[:2] <= PYTHON[1]


def require_seen(feature: str, error: type[LowtideError] = LowtideError) -> None:
    """Refuse a feature that could silently be wrong on a version that nobody has seen."""
    if not is_seen():
        here = f"torch {torch.__version__} and Python {sys.version_info[0]}.{sys.version_info[1]}"
        seen = (
            f"torch {_dotted(TORCH[0])} to {_dotted(TORCH[1])} with Python {_dotted(PYTHON[0])} to {_dotted(PYTHON[1])}"
        )
        raise error(
            f"This is off with {here}: {feature} uses torch's internals",
            hint=f"Install {seen}. The rest of lowtide works.",
        )


def _torch_version() -> tuple[int, ...]:
    return tuple(int(part) for part in torch.__version__.split(".")[:2])


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
