"""A batch of any structure in pieces of some samples each: views, so that nothing is copied."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lowtide.batches import Structure, flatten_with_path, unflatten
from lowtide.compat import pytree
from lowtide.errors import WorkloadError

Split: TypeAlias = "Collection[str | int] | None"


@dataclass(frozen=True)
class Batch:
    """The leaves of a batch, and which of them have a row for each sample."""

    leaves: tuple[Any, ...]
    rows: tuple[bool, ...]  # of each leaf: whether it is split
    structure: Structure
    samples: int

    @classmethod
    def of(cls, batch: Any, split: Split = None) -> Batch:
        """Tensors with a dimension have a row for each sample, or those under the keys of ``split`` alone.

        Raises ``WorkloadError`` if such tensors differ in their first dimension.
        """
        with_paths, structure = flatten_with_path(batch)
        leaves = tuple(leaf for _, leaf in with_paths)
        rows = tuple(
            isinstance(leaf, Tensor) and leaf.ndim > 0 and (split is None or _key(path) in split)
            for path, leaf in with_paths
        )
        sizes = {
            pytree.keystr(path) or "the batch": len(leaf)
            for (path, leaf), split_here in zip(with_paths, rows, strict=True)
            if split_here
        }
        if not sizes:
            raise WorkloadError(
                "The batch has no tensor with samples to split",
                hint="Pass tensors in mappings, tuples or dataclasses"
                + ("." if split is None else f", and in split= their keys: {_keys(with_paths)}."),
            )
        if len(set(sizes.values())) > 1:
            shown = ", ".join(f"{name} has {size}" for name, size in sizes.items())
            raise WorkloadError(
                f"The tensors of the batch do not agree on how many samples there are: {shown}",
                hint=f"Name those that have a row for each sample: split=(...) with keys of {_keys(with_paths)}.",
            )
        return cls(leaves, rows, structure, next(iter(sizes.values())))

    def pieces(self, size: int) -> Iterator[tuple[int, int]]:
        """From which sample to which; the last piece may be smaller.

        A sample that would be left alone gets half of the piece before it: a batch norm cannot do with one.
        """
        ends = [*range(size, self.samples, size), self.samples]
        if len(ends) > 1 and size > 2 and ends[-1] - ends[-2] == 1:
            ends[-2] -= size // 2
        yield from zip([0, *ends[:-1]], ends, strict=True)

    def piece(self, start: int, end: int, own: Mapping[int, Tensor] | None = None) -> Any:
        """The same structure with some of the samples; ``own`` has leaves that are cut already."""
        cut = [leaf[start:end] if split else leaf for leaf, split in zip(self.leaves, self.rows, strict=True)]
        for i, tensor in (own or {}).items():
            cut[i] = tensor
        return unflatten(cut, self.structure)

    def chosen(self, samples: Sequence[int]) -> Any:
        """The same structure with samples from anywhere, copied."""
        chosen = [
            leaf.detach()[torch.tensor(samples, device=leaf.device)] if split else leaf
            for leaf, split in zip(self.leaves, self.rows, strict=True)
        ]
        return unflatten(chosen, self.structure)


def _key(path: tuple[Any, ...]) -> str | int | None:
    """The outermost key on the way to a leaf: of a dict, of a sequence, or a dataclass's field."""
    if not path:
        return None
    first = path[0]
    return next((getattr(first, name) for name in ("key", "idx", "name") if hasattr(first, name)), None)


def _keys(with_paths: Sequence[tuple[tuple[Any, ...], Any]]) -> str:
    return ", ".join(dict.fromkeys(repr(_key(path)) for path, leaf in with_paths if isinstance(leaf, Tensor)))
