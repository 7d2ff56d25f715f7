"""Private attributes of tensors, storages and generators."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from lowtide.compat.versions import TRIED

version_of: Callable[[Tensor], int] = attrgetter("_version")
"""Return how often a tensor's values were written in place, over all its views."""

storage_id: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")
"""Return the address of a storage object, also where it has no data. Take ``tensor.untyped_storage()``."""

generator_id: Callable[[torch.Generator], int] = attrgetter("_cdata")
"""Return the address of a generator: ops are handed other Python objects around the same one."""

_storage_use_count: Any = TRIED.find("torch._C:_storage_Use_Count")

make_wrapper: Callable[..., Any] = TRIED.find("torch:Tensor._make_wrapper_subclass")
"""Make a tensor of a wrapper subclass, with a shape and no storage."""


def base_of(tensor: Tensor) -> Tensor:
    """Return the tensor that this one is a view of, or itself."""
    return tensor if tensor._base is None else tensor._base


def is_view(tensor: Tensor) -> bool:
    """Tell whether autograd knows a tensor as a view of another."""
    return tensor._base is not None


@TRIED
def is_zero_tensor(tensor: Tensor) -> bool:
    """Tell whether a tensor stands for zeros that no bytes hold."""
    return tensor._is_zerotensor()


@TRIED
def sparse_parts(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return the indices and values of a COO tensor as they are, coalesced or not."""
    return tensor._indices(), tensor._values()


def local_part(tensor: Any) -> Any:
    """Return this process's part of a DTensor; of any other tensor, itself."""
    return getattr(tensor, "_local_tensor", tensor)


def tensor_holders(tensor: Any) -> int:
    """Count the references to a tensor in C++."""
    return tensor._use_count()


def storage_holders(tensor: Tensor) -> int:
    """Count the references to a tensor's storage, one of which is this function's."""
    storage = tensor.untyped_storage()
    return _storage_use_count(storage._cdata)
