"""A step of AdamW with 8-bit states by the kernels that fit: one Triton launch for all parameters on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowtide.compat.fake import FakeTensor
from lowtide.kernels import launches
from lowtide.kernels.reference import adamw8bit as reference
from lowtide.kernels.reference.adamw8bit import Hyper, Moments


class Entry(NamedTuple):
    """One parameter with its gradient and its states, all flat."""

    parameter: Tensor
    gradient: Tensor
    moments: Moments


def step(entries: Sequence[Entry], hyper: Hyper, *, seed: int | None = None) -> Any:
    """Step parameters that share their numbers, in place.

    With a ``seed``, bfloat16 parameters are rounded stochastically; the same seed gives the same rounding. Gives what
    ``launch`` needs to do it once more on the same tensors; None where it cannot.
    """
    if entries and all(_fits(entry) for entry in entries):
        return launches.triton_kernels("adamw8bit").step(entries, hyper, seed=seed)
    for number, entry in enumerate(entries):
        rounds = seed is not None and entry.parameter.dtype == torch.bfloat16
        noise = random_bits(entry.parameter, seed + number) if rounds and seed is not None else None
        reference.step(*entry, hyper, noise)
    return None


def launch(prepared: Any, hyper: Hyper, *, seed: int | None = None) -> None:
    """The step that ``step`` gave, again: all tensors are where they were, and hold new values."""
    launches.triton_kernels("adamw8bit").launch(prepared, hyper, seed=seed)


def random_bits(like: Tensor, seed: int) -> Tensor:
    """16 random bits (int32) for each value, from a seed alone: a step that is run again rounds the same."""
    generator = None
    if not isinstance(like, FakeTensor) and not like.is_meta:
        generator = torch.Generator(like.device).manual_seed(seed)
    return torch.randint(65536, like.shape, generator=generator, device=like.device, dtype=torch.int32)


def _fits(entry: Entry) -> bool:
    dtypes = (entry.parameter.dtype, entry.gradient.dtype)
    return all(launches.fast_kernels("adamw8bit", entry.parameter, dtype) for dtype in dtypes)
