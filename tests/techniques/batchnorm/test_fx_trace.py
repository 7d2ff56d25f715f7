"""Forwards that are no graph: they are left, run as before, and tracing them changes nothing."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowtide.techniques.batchnorm import convert
from tests.techniques.batchnorm.converting import assert_converts
from tests.techniques.batchnorm.models import (
    Block,
    asks_the_type,
    calls_twice,
    decides,
    draws,
    draws_tensors,
    freezes,
    image,
    reads_twice,
    recomputes,
    remembers,
    softens,
)

REASONS: dict[Callable[[Any, Tensor], Tensor], str] = {
    decides: "Block.forward cannot be traced: it decides by the value",
    draws: "draws random numbers",
    draws_tensors: "it computes aten.rand",
    remembers: "it changes the attribute seen",
    freezes: "grad mode",
    recomputes: "checkpoint" if torch.__version__ >= "2.12" else "it computes aten.empty",  # a checkpoint's own
    reads_twice: "its output is read by relu and add",
    calls_twice: "called 2 times",
    softens: "nothing to save",
    asks_the_type: "decides by the type",
}


@pytest.mark.parametrize("run", REASONS, ids=lambda run: run.__name__)
def test_forwards_that_are_left_run_as_before(run: Callable[[Any, Tensor], Tensor]) -> None:
    model = nn.Sequential(Block(run))
    conversion = assert_converts(model, image(), fused=0, left=1)
    assert conversion.left[0].path == "0.bn"
    assert REASONS[run] in conversion.left[0].why
    assert run is not decides or "(models.py, line " in conversion.left[0].why


def test_tracing_leaves_no_trace() -> None:
    model = Block(remembers)
    convert(model)
    assert model.seen == []
    state = random.getstate()
    convert(Block(draws))
    assert random.getstate() == state
