"""The contract, over every technique that is built in and over one that is not."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lowtide.nn import functional
from lowtide.profiling import profile
from lowtide.techniques import Check, Forward, Technique, register, replace_forward, techniques

from ..refusals import refused
from . import outcomes
from .contract import SeveralModels, TechniqueContract
from .outcomes import assert_agree, assert_restored, run, snapshot
from .workloads import WORKLOADS, wide

EXAMPLE = Path(__file__).parents[2] / "examples" / "example_technique.py"


@cache
def load_example() -> Technique:
    spec = importlib.util.spec_from_file_location("example_technique", EXAMPLE)
    assert spec
    assert spec.loader
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.RedrawnDropout()


@pytest.fixture(params=[*techniques(), "redraw"])
def technique(request: pytest.FixtureRequest) -> Iterator[Technique]:
    if request.param == "redraw":
        with register(load_example()):
            yield techniques()["redraw"]
    else:
        yield techniques()[request.param]


class TestEveryTechnique(SeveralModels):
    models = WORKLOADS

    @pytest.fixture
    def technique(self, technique: Technique) -> Technique:
        return technique


def test_every_technique_has_something_to_offer_on_some_workload(technique: Technique) -> None:
    assert any(technique.options(profile(make())) for make in (*WORKLOADS.values(), wide))


def test_the_example_is_short_and_saves_memory() -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 60
    work = WORKLOADS["mlp"]()
    plain = profile(work)
    example = load_example()
    with example.apply(work, example.options(plain)):
        assert profile(work).saved_bytes < plain.saved_bytes


# -- the suite itself: what is wrong must not pass -----------------------------------------------------


class Unguarded(Forward):
    """torch's own checkpoint, which runs batch norm twice."""

    def __call__(self, x: Tensor) -> Tensor:
        return checkpoint(self.plain, x, use_reentrant=False)


class Forgetful(Forward):
    """Recomputation that draws new random numbers."""

    def __call__(self, x: Tensor) -> Tensor:
        return checkpoint(self.plain, x, use_reentrant=False, preserve_rng_state=False)


class Shifted(Forward):
    """Another function."""

    def __call__(self, x: Tensor) -> Tensor:
        return self.plain(x) * (1 + 1e-6)


@pytest.mark.parametrize("forward", [Unguarded, Forgetful, Shifted])
def test_the_suite_refuses_a_forward_that_is_not_bitwise(forward: type[Forward]) -> None:
    work = WORKLOADS["convnet"]()
    expected = run(work)
    with replace_forward(forward(work.model.get_submodule("1"))), pytest.raises(AssertionError):
        assert_agree(run(work), expected, Check.EXACT)


@pytest.mark.parametrize("is_converted", [False, True])
def test_the_suite_refuses_statistics_moved_otherwise_than_the_layers_promise(
    is_converted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under a checkpoint torch's batch norm moves them twice, lowtide's layers once."""
    work, technique = WORKLOADS["convnet"](), techniques()["batchnorm" if is_converted else "sqrt"]
    option = technique.options(profile(work))[0]
    contract = TechniqueContract()
    contract.test_a_checkpoint_around_it_is_as_promised(technique, work, option)
    if is_converted:
        monkeypatch.setattr(functional, "in_backward", lambda: False)  # each layer then takes it for a new pass
    else:
        monkeypatch.setattr(outcomes, "_BatchNormAct", nn.BatchNorm2d)
    with refused("running_mean", kind=AssertionError):
        contract.test_a_checkpoint_around_it_is_as_promised(technique, work, option)


def test_the_suite_notices_what_an_undo_left_behind() -> None:
    model = WORKLOADS["convnet"]().model
    before = snapshot(model)
    assert_restored(model, before)
    model.get_submodule("1.0").forward = model.get_submodule("1.0").forward
    with pytest.raises(AssertionError):
        assert_restored(model, before)
