"""Tensors as bytes: the dense parts that a tensor is made of, and the storages under them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowtide.compat.dispatch import is_wrapper
from lowtide.compat.fake import FakeTensor
from lowtide.compat.tensors import sparse_parts, storage_id
from lowtide.errors import TraceError


def flatten(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Tensor], str]:
    """The tensors among an op's arguments, and the rest as text."""
    tensors: list[Tensor] = []
    rest: list[str] = []
    for value in args:
        _split(value, tensors, rest)
    for key, value in kwargs.items():
        if value is not None:
            rest.append(f"{key}=")
            _split(value, tensors, rest)
    return tensors, " ".join(rest)


def _split(value: Any, tensors: list[Tensor], rest: list[str]) -> None:
    if isinstance(value, Tensor):
        tensors.extend(parts(value))
    elif isinstance(value, (list, tuple)) and any(isinstance(item, (Tensor, list, tuple)) for item in value):
        for item in value:
            _split(item, tensors, rest)
    elif isinstance(value, torch.UntypedStorage | torch.TypedStorage):
        rest.append("storage")  # printing one would read all of it
    else:
        rest.append(str(value))


def leaves(out: Any) -> list[Tensor]:
    if isinstance(out, Tensor):
        return parts(out)
    if isinstance(out, (list, tuple)):
        return [part for item in out for part in leaves(item)]
    return []


def parts(tensor: Tensor) -> list[Tensor]:
    """The dense tensors that hold a tensor's bytes."""
    if tensor.layout is torch.strided:
        if is_wrapper(tensor):
            names, _ = tensor.__tensor_flatten__()
            return [part for name in names for part in parts(getattr(tensor, name))]
        return [tensor]
    if tensor.layout is torch.sparse_coo:
        indices, values = sparse_parts(tensor)
        if isinstance(tensor, FakeTensor) and not values.shape[0]:  # fake kernels forget the entries
            raise TraceError(
                "How many entries a sparse tensor has is not known without its values",
                hint="Profile a real step: leave out fake=True.",
            )
        return [indices, values]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return []  # opaque layouts (oneDNN's) have no storage to count


def address(tensor: Tensor) -> int:
    return storage_id(tensor.untyped_storage()) if tensor.layout is torch.strided else 0


def dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype)[6:]
