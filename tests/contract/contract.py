"""Promises of every technique, as one suite: subclass ``TechniqueContract`` and give the two fixtures.

A technique's author writes, in a test file of their own package:

    class TestMine(TechniqueContract):
        @pytest.fixture
        def technique(self):
            with register(Mine()):
                yield techniques()["mine"]

        @pytest.fixture(params=["mlp", "convnet"])
        def work(self, request, device):
            return moved(WORKLOADS[request.param](), device)

Plain PyTorch is always the reference: the same step on the same model before the technique touched it.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from lowtide.errors import LowtideError
from lowtide.planning import predict
from lowtide.profiling import Profile, profile
from lowtide.techniques import Check, Fidelity, Option, Technique, techniques
from lowtide.workload import Workload

from ..soak import SOAK, count
from .outcomes import (
    Outcome,
    assert_agree,
    assert_restored,
    distance,
    gradients,
    in_float64,
    redrawn,
    run,
    run_or_error,
    snapshot,
    statistics_of_layers,
    without_dropout,
)
from .workloads import DEVICES, moved, seeded, wide

DRAWS = count(250, soak=2_000)
POSITIONS = ("first", "last")  # of the options that are tried on one model; the middle one on each other model
CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "odd": lambda t: t[:3],
    "single": lambda t: t[:1],
    "strided": lambda t: torch.stack([t, t], dim=-1)[..., 0],
    "empty": lambda t: t[:0],
}
_profiles: dict[tuple[str, str], Profile] = {}  # plain steps, by name and device
_results: dict[tuple[str, str, bool], Outcome] = {}  # plain steps, from the same seed
_options: dict[tuple[int, int], tuple[Technique, list[Option]]] = {}  # by technique and step


class TechniqueContract:
    """Fixtures to give: ``technique``, registered, and ``work``, a fresh workload on ``device``."""

    @pytest.fixture(params=DEVICES)
    def device(self, request: pytest.FixtureRequest) -> str:
        return request.param

    @pytest.fixture(autouse=True)
    def _repeatable(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """On a GPU: the plain step itself must give the same bits twice, and round as float32 does."""
        monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)

    @pytest.fixture
    def plain(self, work: Workload) -> Profile:
        key = work.name, work.device.type
        if key not in _profiles:
            _profiles[key] = profile(work)
        return _profiles[key]

    @pytest.fixture(params=POSITIONS)
    def position(self, request: pytest.FixtureRequest) -> str:
        return request.param

    @pytest.fixture
    def option(self, position: str, technique: Technique, work: Workload, plain: Profile) -> Option:
        key = id(technique), id(plain)
        if key not in _options:
            _options[key] = technique, list(technique.options(plain))
        options = _options[key][1]
        if not options:
            pytest.skip(f"{technique.name} has nothing to offer here: it needs {technique.needs}")
        at = {"first": 0, "middle": len(options) // 2, "last": len(options) - 1}[position]
        if position == "last" and at == 0:
            pytest.skip("there are fewer options")
        if technique.check(options[at]).fidelity > Fidelity.ROUNDOFF:
            without_dropout(work.model)  # they may draw numbers of their own, and so shift those of dropout
        return options[at]

    @pytest.fixture
    def expected(self, technique: Technique, work: Workload, option: Option) -> Outcome:
        key = work.name, work.device.type, technique.check(option).fidelity > Fidelity.ROUNDOFF
        if key not in _results:
            _results[key] = run(work)
        return _results[key]

    def test_results_are_as_its_fidelity_promises_and_leave_nothing_behind(
        self, technique, work, option, expected
    ) -> None:
        before = snapshot(work.model)
        with technique.apply(work, [option]) as applied:
            assert_agree(run(applied.work), expected, technique.check(option))
        assert_restored(work.model, before)

    def test_two_steps_in_a_row_are_as_promised(self, technique, work, option) -> None:
        check = technique.check(option)
        if check.fidelity > Fidelity.ROUNDOFF:
            check = replace(check, fidelity=Fidelity.CHANGED)  # the second starts from other parameters
        expected = run(work, steps=2)
        with technique.apply(work, [option]) as applied:
            assert_agree(run(applied.work, steps=2), expected, check)

    def test_other_rounding_is_as_good_as_pytorchs(self, technique, work, option) -> None:
        if technique.check(option).fidelity is not Fidelity.ROUNDOFF:
            pytest.skip("it promises more than roundoff, or less")
        assert_as_good(technique, work, option)

    def test_random_gradients_are_right_on_average(self, technique, work, plain, option) -> None:
        if technique.check(option).fidelity is not Fidelity.UNBIASED:
            pytest.skip("it is not random, or not promised to be right on average")
        if not SOAK and (option != technique.options(plain)[0] or work.name in ("convnet", "transformer")):
            pytest.skip("one option of the smallest model in the default run")
        expected = gradients(work)
        mean, spread = torch.zeros_like(expected), torch.zeros_like(expected)
        with technique.apply(work, [option]) as applied, torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            for count in range(1, DRAWS + 1):
                off = (drawn := gradients(applied.work)) - mean
                mean += off / count
                spread += off * (drawn - mean)
                if count == 20 and not spread.any():
                    break  # nothing is random here but dropout, which is off
        error = (spread.sum() / (count - 1) / count).sqrt()  # of the mean, in the 2-norm
        assert (mean - expected).norm() <= 3 * error + 1e-5 * expected.norm()

    def test_evaluation_mode_is_as_promised(self, technique, work, option) -> None:
        work.model.eval()
        expected = run(work)
        with torch.no_grad():
            value = work.loss(work.model, work.batch)
        with technique.apply(work, [option]) as applied:
            assert_agree(run(applied.work), expected, technique.check(option))
            with torch.no_grad():
                evaluated = applied.work.loss(work.model, work.batch)
            assert_agree({"loss": evaluated}, {"loss": value}, technique.check(option))

    def test_autocast_is_as_promised(self, technique, work, option) -> None:
        work = replace(work, autocast=torch.bfloat16)
        if technique.check(option).fidelity is Fidelity.ROUNDOFF:  # of 16 bits, which the check's bounds are not for
            assert_as_good(technique, work, option)
            return
        expected = run(work)
        with technique.apply(work, [option]) as applied:
            assert_agree(run(applied.work), expected, technique.check(option))

    def test_a_checkpoint_around_it_is_as_promised(self, technique, work, option) -> None:
        inner = work.loss
        around = replace(work, loss=lambda m, b: checkpoint(inner, m, b, use_reentrant=False))
        once = run(work)
        # To the end, or else batch norm behind the last saved tensor would be run once here and twice there.
        with set_checkpoint_early_stop(False):
            expected = run(around)
            with technique.apply(around, [option]) as applied:
                expected |= statistics_of_layers(applied.work.model, once)
                assert_agree(run(applied.work), expected, technique.check(option))

    def test_other_inputs_give_the_same_result_or_the_same_error(self, technique, work, option) -> None:
        for name, change in CHANGES.items():
            other = replace(work, batch=pytree.tree_map_only(Tensor, change, work.batch))
            expected = run_or_error(other)
            with technique.apply(other, [option]) as applied:
                actual = run_or_error(applied.work)
            if isinstance(expected, Exception):
                assert type(actual) is type(expected), name
                assert str(actual) == str(expected), name
            else:
                assert not isinstance(actual, Exception), (name, actual)
                assert_agree(actual, expected, technique.check(option))

    def test_gradient_accumulation_is_as_promised(self, technique, work, option) -> None:
        twice = replace(work, loss=lambda m, b: work.loss(m, b) + 0.5 * work.loss(m, b))
        expected = run(twice)
        with technique.apply(twice, [option]) as applied:
            assert_agree(run(applied.work), expected, technique.check(option))

    def test_state_dict_is_unchanged_while_applied(self, technique, work, option) -> None:
        before = snapshot(work.model)
        with technique.apply(work, [option]):
            if technique.check(option).same_state_dict:
                after = work.model.state_dict()
                assert list(after) == list(before.values)
                assert all(torch.equal(after[name], value) for name, value in before.values.items())
                work.model.load_state_dict(before.values)

    def test_undo_restores_the_model_bit_for_bit(self, technique, work, option, expected) -> None:
        before = snapshot(work.model)
        undo = technique.apply(work, [option])
        undo()
        undo()
        assert_restored(work.model, before)
        assert_agree(run(work), expected, Check.EXACT)

    def test_a_copy_and_a_pickle_run_on_their_own(self, technique, work, option) -> None:
        work = replace(work, optimizer=None)
        expected = run(work)
        check = replace(technique.check(option), leaves_gradients=True)  # no optimizer takes them
        with technique.apply(work, [option]) as applied:
            copies = [copy.deepcopy(work.model), pickle.loads(pickle.dumps(work.model))]
        for model in copies:
            with torch.no_grad():
                for parameter in work.model.parameters():
                    parameter.add_(1)  # a copy that still used the original's parameters would give itself away
            assert_agree(run(replace(applied.work, model=model)), expected, check)

    def test_predicted_bytes_equal_measured_ones_and_nothing_changes(self, technique, work, plain, option) -> None:
        before = snapshot(work.model)
        predicted = predict(work, [option], plain)
        with technique.apply(work, [option]) as applied:
            measured = profile(applied.work)
        assert_restored(work.model, before)
        assert predicted.storage_peak_bytes == measured.storage_peak_bytes
        assert predicted.saved_bytes == measured.saved_bytes
        bytes_inside = inside(predicted), inside(measured)
        assert bytes_inside[0] == pytest.approx(bytes_inside[1], rel=0.01), bytes_inside

    def test_a_price_has_the_fidelity_of_the_check_and_changes_nothing(self, technique, work, plain, option) -> None:
        before = snapshot(work.model)
        price = technique.price(option, plain)
        assert price == technique.price(option, plain)
        assert price.fidelity is technique.check(option).fidelity
        assert_restored(work.model, before)
        last = len(plain.graph.ops)
        assert all(0 <= i.birth < i.death <= last and i.bytes >= 0 for i in (*price.added, *price.removed))

    def test_applying_it_twice_is_refused_and_leaves_the_first(self, technique, work, option, expected) -> None:
        before = snapshot(work.model)
        with technique.apply(work, [option]) as applied:
            with pytest.raises(LowtideError):
                technique.apply(applied.work, [option])
            assert_agree(run(applied.work), expected, technique.check(option))
        assert_restored(work.model, before)

    def test_an_option_of_another_model_is_refused_and_changes_nothing(self, technique, work, option) -> None:
        before = snapshot(work.model)
        foreign = replace(option, site=(*option.site[:-1], "no.such.module"))
        with pytest.raises((LowtideError, AttributeError)):
            technique.apply(work, [foreign])
        assert_restored(work.model, before)


def inside(step: Profile) -> int:
    """The allocated peak without what libraries hold on a GPU beside the step: 66 MiB, of which these have 0.1."""
    held = sum(s.bytes for s in step.graph.storages if s.category == "workspace" and s.label.startswith("libraries"))
    return step.peak_bytes - held


def assert_as_good(technique: Technique, work: Workload, option: Option) -> None:
    """The error of all gradients, against float64 and over five batches, is at most 1.5 times PyTorch's."""
    without_dropout(work.model)
    ours = plains = 0.0
    for seed in range(5):
        drawn = replace(work, batch=redrawn(work.batch, seed))
        exact = run(in_float64(drawn))
        plains += distance(run(drawn), exact)
        with technique.apply(drawn, [option]) as applied:
            ours += distance(run(applied.work), exact)
    assert ours <= 1.5 * plains


class SeveralModels(TechniqueContract):
    """The same on several models: two options on the first, one on each of the others; more in ``make soak``."""

    models: dict[str, Callable[[], Workload]]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "model" in metafunc.fixturenames:
            slow = "predicted" in metafunc.function.__name__ and not SOAK
            metafunc.parametrize(("model", "position"), cases(self.models)[1 if slow else 0 :])

    @pytest.fixture
    def work(self, model: str, device: str) -> Workload:
        return moved(self.models[model](), device)


def cases(models: Iterable[str]) -> list[tuple[str, str]]:
    first, *others = models
    few = [(first, position) for position in POSITIONS] + [(model, "middle") for model in others]
    return [(model, position) for model in models for position in ("middle", *POSITIONS)] if SOAK else few


class StepContract(TechniqueContract):
    """The same for a technique of the step, by its name, over a model with a matrix that is large enough for it."""

    name: str

    @pytest.fixture
    def technique(self):
        return techniques()[self.name]

    @pytest.fixture
    def work(self, device):
        return moved(seeded(wide)(), device)
