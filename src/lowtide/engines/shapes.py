"""Shapes of batches, and the known peaks of their steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import torch

from lowtide.batches import tensors
from lowtide.compat.modules import own_parameters
from lowtide.planning.prediction import apply_options
from lowtide.profiling import Profile, profile
from lowtide.techniques.technique import Option
from lowtide.tracing.snapshot import unchanged
from lowtide.tracing.step_state import modules_of
from lowtide.workload import Workload

Signature = tuple[tuple[torch.Size, torch.dtype], ...]
BatchDimension = tuple[int, int]  # a tensor of a batch, and a dimension of it
T = TypeVar("T")


def signature(batch: Any) -> Signature:
    """Shapes and dtypes of a batch's tensors."""
    return tuple((tensor.shape, tensor.dtype) for tensor in tensors(batch))


def is_within(shape: Signature, other: Signature) -> bool:
    """Tell whether all tensors are of the same dtypes and no larger in any dimension."""
    return len(shape) == len(other) and all(
        dtype == other_dtype
        and len(sizes) == len(other_sizes)
        and all(size <= most for size, most in zip(sizes, other_sizes, strict=True))
        for (sizes, dtype), (other_sizes, other_dtype) in zip(shape, other, strict=True)
    )


def differing(shape: Signature, other: Signature) -> frozenset[BatchDimension] | None:
    """Dimensions in which two shapes differ; None if they differ in more than sizes.

    >>> one, two = torch.zeros(2, 3), torch.zeros(2, 4)
    >>> differing(signature([one, one]), signature([one, two]))
    frozenset({(1, 1)})
    """
    if [(len(sizes), dtype) for sizes, dtype in shape] != [(len(sizes), dtype) for sizes, dtype in other]:
        return None
    return frozenset(
        (tensor, dim)
        for tensor, ((sizes, _), (other_sizes, _)) in enumerate(zip(shape, other, strict=True))
        for dim, (size, other_size) in enumerate(zip(sizes, other_sizes, strict=True))
        if size != other_size
    )


def predict_shape(work: Workload, batch: Any, *, device: str, options: Sequence[Option] = ()) -> Profile:
    """Predict a step with another batch, under options that are undone, each new kernel measured alone."""
    work = replace(work, batch=batch)
    with unchanged(work, fake=True), apply_options(work, options) as applied:
        return profile(applied.work, fake=True, device=device, measure=True)


def modes_of(work: Workload) -> int:
    """Hash of modules' modes and trained parameters, which change a step's memory beside its batch."""
    modules = modules_of(work)
    trained = (p is not None and p.requires_grad for module in modules for p in own_parameters(module).values())
    return hash((*(module.training for module in modules), *trained))


@dataclass
class Bounds(Generic[T]):
    """Shapes known to fit a budget and shapes known not to, each with the way that their step runs.

    A batch no larger in any dimension than one that fits is taken to fit, and the other way round.
    """

    fitting: list[tuple[Signature, T]] = field(default_factory=list[tuple[Signature, T]])
    too_large: list[tuple[Signature, T]] = field(default_factory=list[tuple[Signature, T]])

    def __len__(self) -> int:
        return len(self.fitting) + len(self.too_large)

    def fit(self, shape: Signature) -> T | None:
        """The way of a shape that is as large or larger and fits."""
        return next((way for other, way in self.fitting if is_within(shape, other)), None)

    def excess(self, shape: Signature) -> T | None:
        """The way of a shape that is as small or smaller and too large already."""
        return next((way for other, way in self.too_large if is_within(other, shape)), None)

    def note(self, shape: Signature, way: T, *, fits: bool) -> None:
        (self.fitting if fits else self.too_large).append((shape, way))
