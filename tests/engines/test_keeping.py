"""Models that keep tensors from one step to the next: planned as all their steps but the first."""

from __future__ import annotations

import copy
import warnings
import weakref
from collections import OrderedDict, deque
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide import Workload
from lowtide.engines import apply
from lowtide.planning import plan
from lowtide.planning.recomputation import recomputations
from lowtide.tracing import capture

from ..tracing.allocator import allocated_peak_after_others
from .planned import smallest_budget

SHAPE = 1024, 64


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6)))
        self.kept: Any = None


class Table(Model):
    """Made in the first step, as of positions."""

    def forward(self, x: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = torch.arange(x.numel(), dtype=x.dtype).view(x.shape).cos()
        return self.layers(x) * self.kept


class Tables(Model):
    """One for each size."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = {}

    def forward(self, x: Tensor) -> Tensor:
        if len(x) not in self.kept:
            self.kept[len(x)] = torch.arange(x.numel(), dtype=x.dtype).view(x.shape).sin()
        return self.layers(x) * self.kept[len(x)]


class Features(Model):
    """Of the last step, to be looked at."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(x)
        self.kept = x.detach()
        return x


class Memory(Model):
    """Each step reads what the one before left."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(x)
        x = x if self.kept is None else x + 0.1 * self.kept
        self.kept = x.detach().exp()
        return x


class Queue(Model):
    """A buffer that is a view after the first step, and that backward reads when it is replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.randn(*SHAPE))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(x)
        similar = x @ self.queue.T[:, :16]
        self.queue = torch.cat([x.detach()[:256], self.queue])[: SHAPE[0]]
        return similar


class Nested(Model):
    """A table further inside."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = {"cos": {}}

    def forward(self, x: Tensor) -> Tensor:
        if len(x) not in self.kept["cos"]:
            self.kept["cos"][len(x)] = (torch.arange(x.numel(), dtype=x.dtype).view(x.shape).cos(),)
        return self.layers(x) * self.kept["cos"][len(x)][0]


class Last(Model):
    """The features of the last steps."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = deque(maxlen=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(x)
        self.kept.append(x.detach().repeat(1, 4).cos())
        return x


class State:
    """What a model has beside modules and tensors."""

    def __init__(self) -> None:
        self.features: Any = None
        self.layers: list[State] = []

    def __repr__(self) -> str:
        return f"State({self.features}, {self.layers})"


class Hooked(Model):
    """Features that a hook takes, and that an object of the model's own has."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = State()
        self.elsewhere = features = dict[str, Tensor]()

        def hook(module: nn.Module, args: Any, out: Tensor) -> None:
            features["last"] = out.detach().exp()

        self.layers.register_forward_hook(hook)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(x)
        self.kept.features = x.detach().repeat(1, 3).sin()
        return x


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def workload(model: nn.Module) -> Workload:
    return Workload(model, squares, torch.randn(*SHAPE), torch.optim.SGD(model.parameters(), lr=0.1))


def held(model: nn.Module) -> list[tuple[str, Any]]:
    return [(name, value) for module in model.modules() for name, value in vars(module).items()]


MODELS = [Table, Tables, Features, Memory, Queue, Nested, Last, Hooked]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("steps", [0, 2])
def test_a_profile_is_of_the_steady_step(model: type[Model], steps: int) -> None:
    work = workload(model())
    for _ in range(steps):
        squares(work.model, work.batch).backward()
    before = copy.deepcopy(held(work.model)[-1]), work.model.state_dict().keys()
    real, fake = lowtide.profile(work), lowtide.profile(work, fake=True)
    after = held(work.model)[-1], work.model.state_dict().keys()
    assert str(before) == str(after)
    assert real.storage_peak_bytes == fake.storage_peak_bytes
    if not steps:  # what was allocated before is not seen to go
        assert real.peak_bytes == allocated_peak_after_others(work.model, squares, work.batch, work.optimizer)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("engine", "share"), [("graph", 0.0), ("graph", 0.5), ("eager", 0.2)])
def test_a_plan_keeps_its_budget_from_the_second_step_on(model: type[Model], engine: Any, share: float) -> None:
    work = workload(model())
    twin, other = copy.deepcopy(work.model), copy.deepcopy(work.model)
    before = lowtide.profile(work)
    smallest = smallest_budget(work, before, engine, allow="bitwise")
    budget = smallest + int(share * (before.peak_bytes - smallest))
    found = plan(work, budget, profile=before, engine=engine, allow="bitwise")
    assert found.engine == engine
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checked = lowtide.verify(work, found)
    assert checked.ok, str(checked)
    assert checked.storage_peak_bytes == found.storage_peak_bytes
    assert str(held(work.model)) == str(held(other))
    step = apply(found, work)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The step is not the one that was planned")
        peak = allocated_peak_after_others(work.model, lambda _, batch: step.loss(batch), work.batch, work.optimizer)
    assert peak <= budget
    assert step.profile().storage_peak_bytes == found.storage_peak_bytes
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    losses: list[Tensor] = []
    for _ in range(5):
        optimizer.zero_grad()
        losses.append(squares(twin, work.batch))
        losses[-1].backward()
        optimizer.step()
    assert torch.equal(torch.stack([step(work.batch) for _ in range(2)]), torch.stack(losses[3:]).detach())


def test_the_first_step_says_that_it_is_another_one() -> None:
    work = workload(Table())
    step = apply(plan(work, "60%", engine="graph"), work)
    with pytest.warns(RuntimeWarning, match="a first step, which makes what the model keeps"):
        step(work.batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(work.batch)


def test_tables_of_the_first_step_do_not_cost_a_plan_its_small_programs() -> None:
    work, after = workload(Table()), workload(Table())
    squares(after.model, after.batch).backward()
    found = [recomputations(each, lowtide.profile(each)) for each in (work, after)]
    assert found[0].joint.digest == found[1].joint.digest
    assert not found[0].joint.stored


ARRAY = np.random.default_rng(0).random(SHAPE, dtype=np.float32)
LOSSES = {
    "read by backward": lambda m, x: (m.layers(x) * torch.from_numpy(ARRAY)).square().mean(),
    "read by forward alone": lambda m, x: (m.layers(x) + torch.from_numpy(ARRAY)).square().mean(),
    "kept and read": lambda m, x: (m(x) * torch.from_numpy(ARRAY)).square().mean(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_numpy_arrays_count_as_long_as_a_captured_graph_holds_them(name: str) -> None:
    model = Features()
    work = Workload(model, LOSSES[name], torch.randn(*SHAPE), torch.optim.SGD(model.parameters(), lr=0.1))
    found = plan(work, smallest_budget(work, lowtide.profile(work)), engine="graph")
    checked = lowtide.verify(work, found)
    assert checked.ok, str(checked)
    assert checked.storage_peak_bytes == found.storage_peak_bytes


# -- what is left as it was ------------------------------------------------------------------------------


class Average(Model):
    """Moved in place, and no buffer; and a tensor that is trained though it is no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = torch.zeros(*SHAPE)
        self.token = torch.randn(*SHAPE, requires_grad=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(x + self.token)
        with torch.no_grad():
            self.kept.mul_(0.9).add_(x.detach(), alpha=0.1)
        return x + self.kept


@pytest.mark.parametrize("engine", ["graph", "eager"])
def test_tensors_that_are_written_to_are_put_back(engine: Any) -> None:
    model = Average()
    work = workload(model)
    found = plan(work, "75%", engine=engine, allow="bitwise")
    checked = lowtide.verify(work, found)
    assert checked.results_agree, str(checked)
    assert not model.kept.any()
    assert model.token.grad is None


@pytest.mark.parametrize("model", MODELS)
def test_no_fake_tensors_are_left_behind(model: type[Model]) -> None:
    work = workload(model())
    lowtide.profile(work, fake=True)
    plan(work, "80%", allow="bitwise", engine="eager")
    assert type(squares(work.model, work.batch)) is Tensor
    assert type(squares(work.model, work.batch)) is Tensor


@pytest.mark.parametrize("fake", [False, True])
def test_a_loss_may_take_its_batch_apart(fake: bool) -> None:
    model, batch = Features(), {"x": torch.randn(*SHAPE)}
    work = Workload(model, lambda m, batch: squares(m, batch.pop("x")), batch)
    whole = workload(model)
    assert lowtide.profile(work, fake=fake).storage_peak_bytes == lowtide.profile(whole).storage_peak_bytes
    assert list(batch) == ["x"]


class Looking(Model):
    """Whose first step looks at values, and is no graph."""

    def forward(self, x: Tensor) -> Tensor:
        if self.kept is None:
            largest = x.detach().abs().max()
            self.kept = torch.ones(*SHAPE) * (largest if largest < 100 else 100.0)
        return self.layers(x) * self.kept


def test_a_first_step_that_is_not_captured_does_not_stand_in_the_way() -> None:
    work = workload(Looking())
    found = plan(work, smallest_budget(work, lowtide.profile(work)), engine="graph")
    assert lowtide.verify(work, found).ok
    step = apply(found, work)
    with pytest.warns(RuntimeWarning, match="no longer captured as one graph"):
        step(work.batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(work.batch)
        step(work.batch)
    assert step.profile().storage_peak_bytes == found.storage_peak_bytes


class Frozen(Model):
    """A frozen weight as large as what is kept, which is not what is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(*SHAPE), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(x * self.weight)
        self.kept = x.detach().exp()
        return x


def test_frozen_weights_are_not_taken_for_what_is_kept() -> None:
    work = workload(Frozen())
    found = plan(work, smallest_budget(work, lowtide.profile(work)), engine="graph")
    checked = lowtide.verify(work, found)
    assert checked.ok, str(checked)
    assert checked.storage_peak_bytes == found.storage_peak_bytes


def test_a_plain_model_is_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Plain(Model):
        def forward(self, x: Tensor) -> Tensor:
            self.kept = x  # the batch's own
            return self.layers(x)

    runs: list[int] = []
    run = capture._run
    monkeypatch.setattr(capture, "_run", lambda *args, **how: runs.append(1) or run(*args, **how))
    lowtide.profile(workload(Plain()))
    assert len(runs) == 1
    lowtide.profile(workload(Features()))
    assert len(runs) == 3


def test_proxies_of_what_is_gone_do_no_harm() -> None:
    model = Features()
    gone = State()
    model.others = [weakref.proxy(model), weakref.proxy(gone)]
    del gone
    assert lowtide.profile(workload(model)).peak_bytes > 0


class Expanded(Model):
    """A buffer whose values share their places."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(1).expand(64))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) * self.scale


class Rebound(Model):
    """Tensors that are given other data, which no version counts."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = {"average": torch.zeros(64, 64), "sizes": torch.zeros(4)}

    def forward(self, x: Tensor) -> Tensor:
        self.kept["average"].data = self.kept["average"].data * 0.9 + self.layers[0][0].weight.data
        self.kept["sizes"].data = torch.ones(8)
        return self.layers(x)


class Guarded(OrderedDict[str, Any]):
    """As some libraries' outputs are."""

    def clear(self) -> None:
        raise TypeError("cannot be cleared")

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError("cannot be updated")


class Output(Model):
    def __init__(self) -> None:
        super().__init__()
        self.kept = Guarded()
        self.kept["last"] = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(x)
        self.kept["last"] = x.detach()
        return x


class Cached(Model):
    """In an object's list of objects."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = State()
        self.kept.layers = [State()]

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(x)
        first = self.kept.layers[0]
        x = x if first.features is None else x + first.features
        first.features = x.detach()
        return x


class Odd:
    """An object that has no answer."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)


class Oddities(Model):
    """Tensors and objects that cannot be copied, or asked."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = [Odd(), torch.empty(3, device="meta"), torch.ones(4, 4).to_mkldnn(), torch.eye(3).to_sparse()]
        with torch.inference_mode():
            self.register_buffer("fixed", torch.ones(3))
        self.history = [0] * 2000

    def forward(self, x: Tensor) -> Tensor:
        self.history.append(1)
        return self.layers(x)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
@pytest.mark.parametrize("model", [Expanded, Rebound, Output, Cached, Oddities])
def test_what_is_hard_to_put_back_is_put_back(model: type[Model]) -> None:
    work = workload(model())
    before = [str(held(work.model)), *(p.detach().clone() for p in work.model.parameters())]
    for call in (
        lambda: lowtide.profile(work),
        lambda: lowtide.profile(work, fake=True),
        lambda: lowtide.verify(work, plan(work, "90%", engine="eager", allow="bitwise")),
    ):
        call()
        assert str(held(work.model)) == before[0]
        assert all(map(torch.equal, work.model.parameters(), before[1:]))


def test_extractors_are_put_back() -> None:
    class Extractor:
        def __init__(self, model: Model) -> None:
            self.features: Any = None

            def hook(module: nn.Module, args: Any, out: Tensor) -> None:
                self.features = out

            model.layers.register_forward_hook(hook)

    class Layers(Model):
        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x)

    work = workload(Layers())
    extractor = Extractor(work.model)  # pyright: ignore[reportArgumentType]
    lowtide.profile(work, fake=True)
    lowtide.profile(work)
    assert extractor.features is None


def test_what_modules_hold_and_no_step_uses_does_not_count() -> None:
    class Holding(Model):
        def __init__(self) -> None:
            super().__init__()
            self.kept = State()
            self.kept.features = torch.zeros(4096, 4096)  # such as a data set

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x)

    assert lowtide.profile(workload(Holding())).peak_bytes < 4096 * 4096
