"""Batches that torch's pytrees take for leaves are read, faked, planned for and put together like all others."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.batches import flatten, map_tensors, tensors
from tests.encoding import Encoding
from tests.models import blocks


@dataclass(frozen=True, slots=True)
class Frozen:
    x: Tensor
    y: Tensor
    name: str = "train"


class Plain:
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y, self.name = x, y, "train"


class Items(MutableMapping[str, Any]):
    def __init__(self, **items: Any) -> None:
        self._items = items

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._items[key] = value

    def __delitem__(self, key: str) -> None:
        del self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


class Attributes(dict[str, Any]):
    def __init__(self, **items: Any) -> None:
        super().__init__(items)
        self.__dict__ = self


@dataclass
class Derived:
    x: Tensor

    def __post_init__(self) -> None:
        self.y = self.x * 2


def encoding(x: Tensor, y: Tensor) -> Encoding:
    return Encoding({"x": x, "y": y, "name": "train"})


MAKERS = pytest.mark.parametrize("make", [Frozen, Plain, encoding])


def work_of(batch: Any) -> lowtide.Workload:
    model = blocks(6, 16)
    return lowtide.Workload(model, lambda m, b: (m(b.x) - b.y).square().mean(), batch)


@MAKERS
def test_tensors_are_found_and_replaced_and_all_else_stays(make: Any) -> None:
    x, y = torch.zeros(2, 3), torch.ones(2)
    batch = [make(x, y), {"more": make(y, x)}]
    assert all(a is b for a, b in zip(tensors(batch), (x, y, y, x), strict=True))
    doubled = map_tensors(lambda tensor: tensor + 1, batch)
    assert type(doubled[0]) is type(batch[0])
    assert doubled[0].name == "train"
    assert torch.equal(doubled[1]["more"].x, y + 1)
    assert batch[1]["more"].x is y
    others = [make(torch.zeros(5, 3), y), {"more": make(y, x)}]
    assert flatten(others)[1] == flatten(batch)[1]
    assert str(flatten(others)[1]) == str(flatten(batch)[1])


def test_the_callers_batch_is_never_written_to() -> None:
    x = torch.zeros(4, 3)
    for batch in (Items(x=x), Attributes(x=x), Encoding({"x": x})):
        halved = map_tensors(lambda tensor: tensor[:2], batch)
        assert batch["x"] is x
        assert halved["x"].shape == (2, 3)
        assert getattr(halved, "x", halved["x"]).shape == (2, 3)


def test_attributes_that_are_no_fields_count() -> None:
    halved = map_tensors(lambda tensor: tensor[:2], Derived(torch.zeros(4, 3)))
    assert halved.x.shape == halved.y.shape == (2, 3)


def test_a_value_without_tensors_is_a_leaf() -> None:
    leaves = [object(), "text", nn.Linear(2, 2), Tensor, None, 3, Plain(1, 2)]  # pyright: ignore[reportArgumentType]
    assert all(a is b for a, b in zip(flatten(leaves)[0], leaves, strict=True))
    assert tensors(leaves) == []


@MAKERS
def test_a_step_is_traced_and_predicted_to_the_byte(make: Any) -> None:
    x, y = torch.randn(256, 16), torch.randn(256, 16)
    expected = lowtide.profile(work_of(Plain(x, y)))
    work = work_of(make(x, y))
    traced, predicted = lowtide.profile(work), lowtide.profile(work, fake=True)
    assert sum(s.bytes for s in traced.graph.storages if s.category == "input") == x.nbytes + y.nbytes
    assert traced.storage_peak_bytes == predicted.storage_peak_bytes == expected.storage_peak_bytes


def test_a_step_is_planned_on_the_eager_engine() -> None:
    work = work_of(Frozen(torch.randn(256, 16), torch.randn(256, 16)))
    verification = lowtide.verify(work, lowtide.plan(work, "70%", engine="eager", tune=False))
    assert verification.ok, str(verification)


@pytest.mark.filterwarnings(
    "ignore:The model ran in training mode outside:RuntimeWarning"
)  # the plain loss, to compare with
def test_a_step_is_planned_on_the_graph_engine_and_knows_another_batch_of_the_same_shapes() -> None:
    work = work_of(encoding(torch.randn(256, 16), torch.randn(256, 16)))
    other = encoding(torch.randn(256, 16), torch.randn(256, 16))
    plan = lowtide.plan(work, "70%", engine="graph")
    verification = lowtide.verify(work, plan)
    assert verification.ok, str(verification)
    with lowtide.apply(plan, work) as step:
        step.loss(work.batch).backward()
        step.model.zero_grad()
        assert torch.equal(step.loss(other), work.loss(work.model, other))
        assert len(step.work.loss._captured) == 1
