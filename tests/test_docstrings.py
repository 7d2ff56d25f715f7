"""The examples in docstrings give what they say."""

from __future__ import annotations

import doctest
from importlib import import_module
from pathlib import Path

import pytest
import torch

SOURCE = Path(__file__).resolve().parents[1] / "src"
PATHS = [path for path in sorted(SOURCE.rglob("*.py")) if ">>> " in path.read_text(encoding="utf-8")]
NAMES = [".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__") for path in PATHS]


@pytest.mark.parametrize("name", NAMES)
def test_the_examples_of_a_module_run(name: str) -> None:
    with torch.random.fork_rng():
        ran = doctest.testmod(import_module(name))
    assert ran.attempted
    assert not ran.failed
