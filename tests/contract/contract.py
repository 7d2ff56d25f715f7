"""What every technique must hold, as one suite: subclass ``TechniqueContract`` and give the two fixtures.

A technique's author writes, in a test file of their own package:

    class TestMine(TechniqueContract):
        @pytest.fixture
        def technique(self):
            with register(Mine()):
                yield techniques()["mine"]

        @pytest.fixture(params=["mlp", "convnet"])
        def work(self, request):
            return WORKLOADS[request.param]()

Plain PyTorch is always the reference: the same step on the same model before the technique touched it.
"""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from lowtide.errors import LowtideError
from lowtide.planning import predict
from lowtide.profiling import Profile, profile
from lowtide.techniques import Check, Fidelity, Option, Technique
from lowtide.workload import Workload

# -- models that are small and have all that is awkward ------------------------------------------------


class Residual(nn.Module):
    """Batch norm with in-place activations, a second output path, dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)
        self.act = nn.ReLU(inplace=True)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.act(self.norm(self.conv(x))))


class Attention(nn.Module):
    """A pre-norm block that takes a mask by keyword and returns a tuple, as language models do."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.MultiheadAttention(width, 2, dropout=0.1, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, *, mask: Tensor) -> tuple[Tensor, Tensor]:
        y = self.norm(x)
        mixed, weights = self.mix(y, y, y, attn_mask=mask)
        return x + mixed + self.mlp(y), weights.mean()


class Stack(nn.Module):
    """Blocks in a ``nn.ModuleList``, called by hand."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention(width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        mask = x.new_zeros(x.shape[1], x.shape[1])
        extra = x.new_zeros(())
        for layer in self.layers:
            x, weight = layer(x, mask=mask)
            extra = extra + weight
        return x.mean(1) + extra


def _work(name: str, model: nn.Module, *shape: int) -> Workload:
    batch = (torch.randn(*shape), torch.randint(5, (shape[0],)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return Workload(model, lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), batch, optimizer, name=name)


def mlp() -> Workload:
    """A plain chain of layers."""
    layers: list[nn.Module] = []
    for _ in range(6):
        layers += [nn.Linear(16, 16), nn.ReLU(), nn.Dropout(0.5)]
    return _work("mlp", nn.Sequential(*layers, nn.Linear(16, 5)), 12, 16)


def convnet() -> Workload:
    """A stem, a chain of blocks with batch norm, a head."""
    stem = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(inplace=True))
    blocks = nn.Sequential(*(Residual(6) for _ in range(5)))
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5))
    return _work("convnet", nn.Sequential(stem, blocks, head), 4, 3, 9, 7)


def transformer() -> Workload:
    """Blocks with keywords and tuples in a list."""
    return _work("transformer", nn.Sequential(Stack(8, 3), nn.Linear(8, 5)), 4, 6, 8)


def wide() -> Workload:
    """A matrix of 4,096 values under AdamW: what lowers optimizer states leaves smaller ones alone."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5))
    return replace(_work("wide", model, 6, 64), optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2))


def larger(work: Workload) -> Workload:
    """The same with a batch eight times as large: what is saved then outweighs what a checkpoint itself keeps."""
    return replace(work, batch=pytree.tree_map_only(Tensor, lambda t: torch.cat([t] * 8), work.batch))


def _seeded(make: Callable[[], Workload]) -> Callable[[], Workload]:
    def made() -> Workload:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return make()

    return made


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "mlp": _seeded(mlp),
    "convnet": _seeded(convnet),
    "transformer": _seeded(transformer),
}


# -- the suite -----------------------------------------------------------------------------------------


class TechniqueContract:
    """Fixtures to give: ``technique``, registered, and ``work``, a fresh workload."""

    @pytest.fixture
    def plain(self, work: Workload) -> Profile:
        if work.name not in _profiles:
            _profiles[work.name] = profile(work)
        return _profiles[work.name]

    @pytest.fixture(params=["first", "middle", "last"])
    def option(self, request: pytest.FixtureRequest, technique: Technique, work: Workload, plain: Profile) -> Option:
        options = list(technique.options(plain))
        if not options:
            pytest.skip(f"{technique.name} has nothing to offer here: it needs {technique.needs}")
        at = {"first": 0, "middle": len(options) // 2, "last": len(options) - 1}[request.param]
        if options.index(options[at]) != at or (request.param != "first" and at == 0):
            pytest.skip("there are fewer options")
        if technique.check(options[at]).fidelity > Fidelity.ROUNDOFF:
            without_dropout(work.model)  # they may draw numbers of their own, and so shift those of dropout
        return options[at]

    def test_results_are_as_its_fidelity_promises(self, technique, work, option) -> None:
        expected = run(work)
        with technique.apply(work, [option]) as applied:
            assert_agree(run(applied.work), expected, technique.check(option))

    def test_price_and_check_declare_the_same_fidelity(self, technique, plain, option) -> None:
        assert technique.price(option, plain).fidelity is technique.check(option).fidelity

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
        without_dropout(work.model)
        found: list[tuple[Outcome, Outcome, Outcome]] = []
        for seed in range(5):
            drawn = replace(work, batch=redrawn(work.batch, seed))
            with technique.apply(drawn, [option]) as applied:
                found.append((run(applied.work), run(drawn), run(in_float64(drawn))))
        ours = sum(distance(mine, exact) for mine, _, exact in found)
        plains = sum(distance(plain, exact) for _, plain, exact in found)
        assert ours <= 1.5 * plains

    def test_random_gradients_are_right_on_average(self, technique, work, plain, option) -> None:
        if technique.check(option).fidelity is not Fidelity.UNBIASED:
            pytest.skip("it is not random, or not promised to be right on average")
        if not SOAK and option != technique.options(plain)[0]:
            pytest.skip("one option in the default run")
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
                found = applied.work.loss(work.model, work.batch)
            assert_agree({"loss": found}, {"loss": value}, technique.check(option))

    def test_autocast_is_as_promised(self, technique, work, option) -> None:
        work = replace(work, autocast=torch.bfloat16)
        expected = run(work)
        with technique.apply(work, [option]) as applied:
            assert_agree(run(applied.work), expected, technique.check(option))

    def test_a_checkpoint_around_it_is_as_promised(self, technique, work, option) -> None:
        inner = work.loss
        around = replace(work, loss=lambda m, b: checkpoint(inner, m, b, use_reentrant=False))
        # To the end, or else batch norm behind the last saved tensor would be run once here and twice there.
        with set_checkpoint_early_stop(False):
            expected = run(around)
            with technique.apply(around, [option]) as applied:
                assert_agree(run(applied.work), expected, technique.check(option))

    @pytest.mark.parametrize("change", ["odd", "single", "strided", "empty"])
    def test_other_inputs_give_the_same_result_or_the_same_error(self, technique, work, option, change) -> None:
        other = replace(work, batch=pytree.tree_map_only(Tensor, CHANGES[change], work.batch))
        expected = run_or_error(other)
        with technique.apply(other, [option]) as applied:
            found = run_or_error(applied.work)
        if isinstance(expected, Exception):
            assert type(found) is type(expected)
            assert str(found) == str(expected)
        else:
            assert not isinstance(found, Exception), found
            assert_agree(found, expected, technique.check(option))

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

    def test_undo_restores_the_model_bit_for_bit(self, technique, work, option) -> None:
        before = snapshot(work.model)
        expected = run(work)
        undo = technique.apply(work, [option])
        undo()
        undo()
        assert_restored(work.model, before)
        assert_agree(run(work), expected, Check.EXACT)

    def test_undo_after_a_step_leaves_nothing_behind(self, technique, work, option) -> None:
        before = snapshot(work.model)
        with technique.apply(work, [option]) as applied:
            run(applied.work)
        assert_restored(work.model, before)

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

    def test_predicted_bytes_equal_measured_ones(self, technique, work, plain, option) -> None:
        predicted = predict(work, [option], plain)
        with technique.apply(work, [option]) as applied:
            measured = profile(applied.work)
        assert predicted.storage_peak_bytes == measured.storage_peak_bytes
        assert predicted.saved_bytes == measured.saved_bytes
        assert predicted.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.01)

    def test_pricing_changes_nothing(self, technique, work, plain, option) -> None:
        before = snapshot(work.model)
        price = technique.price(option, plain)
        assert price == technique.price(option, plain)
        assert_restored(work.model, before)
        last = len(plain.graph.ops)
        assert all(0 <= i.birth < i.death <= last and i.bytes >= 0 for i in (*price.added, *price.removed))

    def test_applying_it_twice_is_refused_and_leaves_the_first(self, technique, work, option) -> None:
        before = snapshot(work.model)
        expected = run(work)
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


# -- how it is compared --------------------------------------------------------------------------------

Outcome = dict[str, Tensor]

_profiles: dict[str, Profile] = {}  # of the plain steps, by name: they do not change

CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "odd": lambda t: t[:3],
    "single": lambda t: t[:1],
    "strided": lambda t: torch.stack([t, t], dim=-1)[..., 0],
    "empty": lambda t: t[:0],
}


DRAWS = 2_000
SOAK = bool(os.environ.get("LOWTIDE_SOAK"))


def run(work: Workload, *, steps: int = 1) -> Outcome:
    """Training steps from a fixed seed, and what they left; the model and the optimizer are put back after."""
    found: Outcome = {}
    with kept(work), torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        for i in range(steps):
            work.model.zero_grad()
            loss = work.compute_loss()
            loss.backward()
            found[f"loss {i}"] = loss.detach()
            found |= {f"{n}.grad": p.grad.clone() for n, p in work.model.named_parameters() if p.grad is not None}
            if work.optimizer is not None:
                work.optimizer.step()
        found |= {f"{name}, trained": p.detach().clone() for name, p in work.model.named_parameters()}
        found |= {name: buffer.clone() for name, buffer in work.model.named_buffers()}
        work.model.zero_grad()
        return found | {"generator": torch.get_rng_state()}


def gradients(work: Workload) -> Tensor:
    """All gradients of one step as one vector, from the generator as it is; buffers may move."""
    work.model.zero_grad()
    work.compute_loss().backward()
    return torch.cat([p.grad.flatten() for p in work.model.parameters() if p.grad is not None])


def distance(found: Outcome, exact: Outcome) -> float:
    """The norm of the error of all gradients."""
    names = [name for name in exact if name.endswith(".grad")]
    return float(torch.stack([(found[name].double() - exact[name]).norm() for name in names]).norm())


def redrawn(batch: Any, seed: int) -> Any:
    """The batch with other numbers; labels stay."""
    generator = torch.Generator().manual_seed(seed)
    return pytree.tree_map_only(
        Tensor, lambda t: torch.randn(t.shape, generator=generator) if t.is_floating_point() else t, batch
    )


def in_float64(work: Workload) -> Workload:
    model = copy.deepcopy(work.model).double()
    for module in model.modules():
        vars(module).pop("forward", None)
    batch = pytree.tree_map_only(Tensor, lambda t: t.double() if t.is_floating_point() else t, work.batch)
    return replace(work, model=model, batch=batch, optimizer=None)


def without_dropout(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0


def run_or_error(work: Workload) -> Outcome | Exception:
    try:
        return run(work)
    except Exception as error:
        return error


def assert_agree(found: Outcome, expected: Outcome, check: Check) -> None:
    """Results as a check promises. Random ones only where they are exact: before the first gradient."""
    if not check.leaves_gradients:
        expected = {name: value for name, value in expected.items() if not name.endswith(".grad")}
    assert found.keys() == expected.keys()
    exact = check.fidelity <= Fidelity.ROUNDOFF
    for name, value in expected.items():
        if name == "generator" and not exact:
            continue
        new, old = found[name].double(), value.double()
        # An empty batch has a mean of nan, with and without.
        assert torch.equal(new.isnan(), old.isnan()), name
        if check.fidelity is Fidelity.CHANGED:
            continue
        assert found[name].dtype == value.dtype, name
        if check.fidelity is Fidelity.UNBIASED and name.endswith((".grad", ", trained")):
            continue
        new, old = new.nan_to_num(123.0), old.nan_to_num(123.0)
        if check.fidelity is Fidelity.BITWISE:
            assert torch.equal(new, old), name
        else:
            assert (new - old).norm() <= check.atol + check.rtol * old.norm(), name


@dataclass(frozen=True)
class Snapshot:
    """A model as it is: its tree, its attributes, its tensors by identity and by value."""

    tree: list[tuple[str, type]]
    attributes: list[dict[str, Any]]
    inner: list[tuple[dict[str, Any], dict[str, Any]]]
    hooks: list[int]
    values: dict[str, Tensor]


def snapshot(model: nn.Module) -> Snapshot:
    return Snapshot(
        tree=[(name, type(module)) for name, module in model.named_modules()],
        attributes=[dict(module.__dict__) for module in model.modules()],
        inner=[(dict(module._parameters), dict(module._buffers)) for module in model.modules()],
        hooks=[len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()],
        values={name: value.clone() for name, value in model.state_dict().items()},
    )


def assert_restored(model: nn.Module, before: Snapshot) -> None:
    after = snapshot(model)
    assert after.tree == before.tree
    assert after.hooks == before.hooks
    for new, old in zip(after.attributes, before.attributes, strict=True):
        assert list(new) == list(old)
        assert all(new[key] is old[key] for key in old)
    for new, old in zip(after.inner, before.inner, strict=True):
        assert all(x.keys() == y.keys() and all(x[k] is y[k] for k in y) for x, y in zip(new, old, strict=True))
    assert all(torch.equal(after.values[name], value) for name, value in before.values.items())


@contextmanager
def kept(work: Workload) -> Iterator[None]:
    """Put parameters, buffers and the optimizer's state back."""
    before = {name: value.clone() for name, value in work.model.state_dict().items()}
    state = None if work.optimizer is None else copy.deepcopy(work.optimizer.state_dict())
    try:
        yield
    finally:
        with torch.no_grad():
            for name, value in work.model.state_dict().items():
                value.copy_(before[name])
        if work.optimizer is not None and state is not None:
            work.optimizer.load_state_dict(state)
