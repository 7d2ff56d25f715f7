"""``import lowtide``: a dozen names, and nothing paid for before one is used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import lowtide
from tests.refusals import refused

ROOT = Path(__file__).resolve().parents[1]


def fresh(code: str) -> str:
    """Return the output of a fresh interpreter."""
    env = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    return subprocess.check_output([sys.executable, "-c", code], env=env, text=True).strip()


def test_every_name_of_the_front_door_opens() -> None:
    for name in lowtide.__all__:
        assert getattr(lowtide, name) is not None
    assert set(lowtide.__all__) <= set(dir(lowtide))
    assert callable(lowtide.profile)
    assert callable(lowtide.plan)


def test_a_wrong_name_is_an_attribute_error() -> None:
    with refused("lowtide", "'profiel'", kind=AttributeError):
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
    """One interpreter checks the library, its zoo and the benchmarks' harness: each start imports torch."""
    code = """
import sys, torch, numpy, scipy.optimize
def brought():
    return {m.partition('.')[0] for m in set(sys.modules) - before} - sys.stdlib_module_names
before = set(sys.modules)
import lowtide
for name in lowtide.__all__:
    getattr(lowtide, name)
print(*sorted(brought() - {'torch', 'numpy', 'scipy'}), torch.cuda.is_initialized())
print(*sorted(m for m in sys.modules if m.startswith('lowtide.zoo.')))
print(lowtide.nn.BatchNormAct2d.__name__)
import benchmarks.harness
print(*sorted(brought() - {'torch', 'numpy', 'scipy'}))
"""
    library, zoo, layer, harness = fresh(code).splitlines()
    assert library == "lowtide False"
    assert zoo == "lowtide.zoo.batches lowtide.zoo.catalog"  # no model
    assert layer == "BatchNormAct2d"
    assert harness == "benchmarks lowtide"
