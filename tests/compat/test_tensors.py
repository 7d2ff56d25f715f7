"""Private attributes of tensors and storages are what their docstrings say."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowtide.compat import tensors
from lowtide.compat.fake import FakeTensorMode


def test_versions_count_writes_through_any_view() -> None:
    x = torch.zeros(4)
    before = tensors.version_of(x)
    x[:2].add_(1)
    assert tensors.version_of(x) == before + 1


def test_views_share_a_storage_and_know_their_base() -> None:
    x = torch.zeros(4)
    view = x[:2]
    assert tensors.storage_id(view.untyped_storage()) == tensors.storage_id(x.untyped_storage())
    assert tensors.storage_id(x.untyped_storage()) != tensors.storage_id(x.clone().untyped_storage())
    assert tensors.base_of(view) is tensors.base_of(x) is x
    assert (tensors.is_view(view), tensors.is_view(x)) == (True, False)


def test_fake_storages_have_ids_of_their_own() -> None:
    with FakeTensorMode():
        first, second = torch.zeros(4), torch.zeros(4)
    assert tensors.storage_id(first.untyped_storage()) != tensors.storage_id(second.untyped_storage())


def test_generators_are_known_by_their_ids() -> None:
    assert tensors.generator_id(torch.default_generator) == tensors.generator_id(torch.default_generator)
    assert tensors.generator_id(torch.Generator()) != tensors.generator_id(torch.default_generator)


def test_a_wrapper_has_a_shape_and_no_bytes() -> None:
    class Wrapper(Tensor):
        __torch_dispatch__: Any = lambda *_: None

    made = tensors.make_wrapper(Wrapper, (2**20, 2**20), dtype=torch.float32)
    assert (type(made), tuple(made.shape)) == (Wrapper, (2**20, 2**20))


def test_zeros_without_bytes_are_told_from_others() -> None:
    zeros: Any = torch.ops.aten._efficientzerotensor.default([2])
    assert (tensors.is_zero_tensor(zeros), tensors.is_zero_tensor(torch.zeros(2))) == (True, False)


def test_a_sparse_tensor_has_two_parts() -> None:
    indices, values = torch.tensor([[0, 2, 2]]), torch.ones(3)
    found = tensors.sparse_parts(torch.sparse_coo_tensor(indices, values, (4,), check_invariants=True))
    assert torch.equal(found[0], indices)
    assert torch.equal(found[1], values)


def test_the_local_part_of_a_plain_tensor_is_itself() -> None:
    x = torch.ones(2)
    assert tensors.local_part(x) is x


def test_holders_are_counted() -> None:
    x = torch.ones(2)
    alone, tensors_alone = tensors.storage_holders(x), tensors.tensor_holders(x)
    view = x[:1]
    assert tensors.storage_holders(x) == alone + 1
    assert tensors.tensor_holders(x) > tensors_alone  # autograd's view holds its base
    del view
    assert (tensors.storage_holders(x), tensors.tensor_holders(x)) == (alone, tensors_alone) == (2, 1)
