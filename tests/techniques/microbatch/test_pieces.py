"""A batch in pieces gives the gradients of the whole batch, whatever the batch is made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import lowtide
from lowtide import Workload, zoo
from lowtide.errors import WorkloadError

from ...encoding import Encoding
from ...soak import in_soak
from .steps import assert_same, cross_entropy, in_float64, mlp, names, step, without_randomness

pytestmark = pytest.mark.filterwarnings("ignore:The model has batch norms in training:UserWarning")

NAMES = ["resnet18", "resnet18-1d", "resnext50", "wrn28-2", "densenet121", "roberta-base"]


@pytest.mark.parametrize("name", ["lenet", "unet", "gpt2", "lstm", *in_soak(NAMES)])
def test_gradients_of_the_zoo_equal_the_full_batchs_in_float64(name: str) -> None:
    work = in_float64(zoo.small(name, batch=5))
    without_randomness(work)
    for module in work.model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()  # as when it is frozen: the rest of the model is the same model without it
    expected = step(work)
    for size in (1, 2):
        assert_same(step(lowtide.microbatch(work, size)), expected)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6])
def test_an_uneven_last_piece_counts_what_it_has(size: int) -> None:
    work = mlp(7)
    assert_same(step(lowtide.microbatch(work, size)), step(work))


def test_pieces_run_one_after_the_other_with_the_samples_they_should_have() -> None:
    seen: list[list[int]] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        seen.append(batch[2].tolist())
        return cross_entropy(model, batch)

    work = mlp(7, loss=loss)
    work = replace(work, batch=(*work.batch, torch.arange(7)))
    lowtide.microbatch(work, 3, reduction="mean").compute_loss()
    assert seen == [[0, 1, 2], [3, 4], [5, 6]]  # none is left alone


@dataclass
class Sentences:
    ids: Tensor
    labels: Tensor
    name: str = ""


pytree.register_dataclass(Sentences, drop_field_names=["name"])


def test_batches_are_any_pytree_and_what_is_no_tensor_passes_through() -> None:
    work = mlp(6)
    x, y = work.batch
    scale = torch.tensor(2.0, dtype=torch.float64)  # no samples in it
    model = work.model

    def nested(model: nn.Module, batch: Any) -> Tensor:
        assert batch["what"] == "train"
        return batch["scale"] * cross_entropy(model, batch["pair"][0])

    batch = {"pair": [(x, y)], "what": "train", "scale": scale}
    expected = step(replace(work, loss=nested, batch=batch))
    assert_same(step(lowtide.microbatch(replace(work, loss=nested, batch=batch), 4)), expected)
    actual = replace(work, loss=lambda m, b: cross_entropy(m, (b.ids, b.labels)), batch=Sentences(x, y))
    assert_same(step(lowtide.microbatch(actual, 4)), step(work))
    alone = Workload(model, lambda m, x: m(x).square().mean(), x)
    assert_same(step(lowtide.microbatch(alone, 4)), step(alone))


class Frozen(Mapping[str, Any]):
    def __init__(self, items: Mapping[str, Any]) -> None:
        self._items = dict(items)

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


@pytest.mark.parametrize("kind", [Encoding, Frozen, MappingProxyType])
def test_batches_are_any_mapping_too(kind: Any) -> None:
    work = mlp(6)
    x, y = work.batch
    seen: list[int] = []

    def forward(model: nn.Module, *, ids: Tensor, labels: Tensor, name: str, more: Any) -> Tensor:
        seen.append(len(ids))
        assert len(more[0]["mask"]) == len(ids)
        assert name == "train"
        return cross_entropy(model, (ids, labels))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        assert type(batch) is kind
        assert type(batch["more"][0]) is kind
        if isinstance(batch, Encoding):
            assert batch.labels is batch["labels"]
            assert batch.encodings == ["a"]
        return forward(model, **batch)

    def make(items: dict[str, Any]) -> Any:
        return Encoding(items, ["a"]) if kind is Encoding else kind(items)

    batch = make({"ids": x, "labels": y, "name": "train", "more": [make({"mask": torch.ones(6)})]})
    actual = replace(work, loss=loss, batch=batch)
    assert_same(step(lowtide.microbatch(actual, 4, reduction="mean")), step(work))
    assert seen == [4, 2]
    assert batch["ids"] is x
    assert len(batch["more"][0]["mask"]) == 6
    assert_same(step(lowtide.microbatch(actual, 4, split=("ids", "labels", "more"))), step(work))


def test_a_batch_whose_tensors_do_not_agree_is_refused_until_split_says_which() -> None:
    weights = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    work = mlp(6, loss=lambda m, b: F.cross_entropy(m(b[0]), b[1], weight=b[2]))
    work = replace(work, batch=(*work.batch, weights))
    with names(pytest.raises(WorkloadError), "[1] has 6, [2] has 3", "split="):
        lowtide.microbatch(work, 2)
    with names(pytest.raises(WorkloadError), "no tensor", "split="):
        lowtide.microbatch(work, 2, split=("x",))
    assert_same(step(lowtide.microbatch(work, 4, split=(0, 1))), step(work))
