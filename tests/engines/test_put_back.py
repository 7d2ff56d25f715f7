"""What a profile, a plan and its verification leave as it was, whatever holds it."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide import Workload
from lowtide.engines import plan

from .keeping import MODELS, SHAPE, Features, Model, State, held, squares, workload


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
    found = plan(work, "75%", engine=engine, allow="bitwise", tune=False)
    checked = lowtide.verify(work, found)
    assert checked.results_agree, str(checked)
    assert not model.kept.any()
    assert model.token.grad is None


@pytest.mark.parametrize("model", MODELS)
def test_no_fake_tensors_are_left_behind(model: type[Model]) -> None:
    work = workload(model())
    lowtide.profile(work, fake=True)
    plan(work, "85%", allow="bitwise", engine="eager", tune=False)
    assert type(squares(work.model, work.batch)) is Tensor
    assert type(squares(work.model, work.batch)) is Tensor


@pytest.mark.parametrize("fake", [False, True])
def test_a_loss_may_take_its_batch_apart(fake: bool) -> None:
    model, batch = Features(), {"x": torch.randn(*SHAPE)}
    work = Workload(model, lambda m, batch: squares(m, batch.pop("x")), batch)
    whole = workload(model)
    assert lowtide.profile(work, fake=fake).storage_peak_bytes == lowtide.profile(whole).storage_peak_bytes
    assert list(batch) == ["x"]


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
        lambda: lowtide.verify(work, plan(work, "90%", engine="eager", allow="bitwise", tune=False)),
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
