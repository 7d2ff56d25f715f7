"""The contract, over every technique that is built in and over one that is not."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from lowtide.profiling import profile
from lowtide.techniques import Technique, register, techniques
from lowtide.workload import Workload

from .contract import WORKLOADS, TechniqueContract

EXAMPLE = Path(__file__).parents[2] / "examples" / "example_technique.py"


def load_example() -> Technique:
    spec = importlib.util.spec_from_file_location("example_technique", EXAMPLE)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.RedrawnDropout()


@pytest.fixture(params=[*techniques(), "redraw"])
def technique(request: pytest.FixtureRequest) -> Iterator[Technique]:
    if request.param == "redraw":
        with register(load_example()):
            yield techniques()["redraw"]
    else:
        yield techniques()[request.param]


class TestEveryTechnique(TechniqueContract):
    @pytest.fixture
    def technique(self, technique: Technique) -> Technique:
        return technique

    @pytest.fixture(params=list(WORKLOADS))
    def work(self, request: pytest.FixtureRequest) -> Workload:
        return WORKLOADS[request.param]()


def test_every_technique_has_something_to_offer_on_some_workload(technique: Technique) -> None:
    assert any(technique.options(profile(make())) for make in WORKLOADS.values())


def test_the_example_is_short_and_saves_memory() -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 60
    work = WORKLOADS["mlp"]()
    plain = profile(work)
    example = load_example()
    with example.apply(work, example.options(plain)):
        assert profile(work).saved_bytes < plain.saved_bytes
