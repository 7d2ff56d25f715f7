"""Rounding is measured by the step itself."""

from __future__ import annotations

import math

import pytest
import torch

from lowtide.planning.rounding import Rounding, loss_and_gradients

from .test_captured import work_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_explains_the_last_digits_and_not_a_percentage(dtype: torch.dtype) -> None:
    work = work_of("same", dtype)
    plain = loss_and_gradients(work)
    rounding = Rounding(work, plain)
    unit = torch.finfo(dtype).eps
    for what in ("loss", "gradients"):
        near = {name: tensor * (1 + unit) for name, tensor in plain[what].items()}
        far = {name: tensor * 1.2 for name, tensor in plain[what].items()}
        assert rounding.explains(what, plain[what], near)
        assert not rounding.explains(what, plain[what], far)


@pytest.mark.parametrize(
    ("plain_off", "off", "near"), [(0.1, 0.0, True), (0.1, 0.15, True), (0.1, 0.3, False), (0.0, 0.02, False)]
)
def test_results_are_as_near_as_the_plain_ones_within_twice_their_distance(
    plain_off: float, off: float, near: bool
) -> None:
    work = work_of("same", torch.float32)
    gradients = loss_and_gradients(work)["gradients"]
    first = next(iter(gradients))
    plain, other = (
        {name: tensor * (1 + share) if name == first else tensor for name, tensor in gradients.items()}
        for share in (plain_off, off)
    )
    rounding = Rounding(work)
    assert rounding.is_as_near("gradients", gradients, plain, other) is near
    assert not rounding.is_as_near("gradients", gradients, plain, {first: gradients[first]})


def test_what_is_not_finite_is_near_to_nothing() -> None:
    work = work_of("same", torch.float32)
    exact = loss_and_gradients(work)["gradients"]
    plain = {name: tensor.clone().fill_(math.inf) for name, tensor in exact.items()}
    rounding = Rounding(work)
    assert rounding.is_as_near("gradients", exact, exact, exact)
    assert not rounding.is_as_near("gradients", exact, plain, exact)
    assert not rounding.is_as_near("gradients", plain, plain, plain)
