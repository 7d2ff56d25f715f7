"""``import lowtide``: a dozen names, and nothing paid for before one is used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import lowtide

ROOT = Path(__file__).resolve().parents[1]


def fresh(code: str) -> str:
    """What a fresh interpreter prints."""
    env = {"PYTHONPATH": str(ROOT / "src")}
    return subprocess.check_output([sys.executable, "-c", code], env=env, text=True).strip()


def test_every_name_of_the_front_door_opens() -> None:
    for name in lowtide.__all__:
        assert getattr(lowtide, name) is not None
    assert set(lowtide.__all__) <= set(dir(lowtide))
    assert callable(lowtide.profile)
    assert callable(lowtide.plan)


def test_layers_and_models_are_attributes() -> None:
    code = "import lowtide; print(lowtide.nn.BatchNormAct2d.__name__, lowtide.zoo.__name__)"
    assert fresh(code) == "BatchNormAct2d lowtide.zoo"


def test_a_wrong_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'profiel'"):
        _ = lowtide.profiel  # pyright: ignore[reportAttributeAccessIssue]


def test_importing_brings_nothing_and_takes_no_time() -> None:
    brought, seconds = fresh(
        "import sys, time; before = set(sys.modules); start = time.perf_counter(); import lowtide;"
        "took = time.perf_counter() - start; new = {m.partition('.')[0] for m in set(sys.modules) - before};"
        "print(','.join(sorted(new - sys.stdlib_module_names)), took)"
    ).split()
    assert brought == "lowtide"
    assert float(seconds) < 0.3


def test_using_every_name_brings_torch_numpy_and_scipy_alone_and_starts_no_cuda() -> None:
    code = """
import sys, torch, numpy, scipy.optimize
before = set(sys.modules)
import lowtide
for name in lowtide.__all__:
    getattr(lowtide, name)
new = {m.partition('.')[0] for m in set(sys.modules) - before} - sys.stdlib_module_names
print(','.join(sorted(new - {'torch', 'numpy', 'scipy'})), torch.cuda.is_initialized())
"""
    assert fresh(code) == "lowtide False"
