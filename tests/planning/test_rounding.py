"""Rounding is measured by the step itself."""

from __future__ import annotations

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
