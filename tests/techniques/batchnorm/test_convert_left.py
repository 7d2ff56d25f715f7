"""What cannot be converted is left as it was, with a reason."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowtide.errors import LowtideError
from lowtide.nn import BatchNormAct2d
from lowtide.techniques.batchnorm import convert
from tests.techniques.batchnorm.converting import (
    assert_converts,
    hooked,
)
from tests.techniques.batchnorm.models import (
    Block,
    Gate,
    OwnNorm,
    PreActivation,
    asks_the_type,
    calls_twice,
    conv,
    decides,
    draws,
    draws_tensors,
    freezes,
    image,
    reads_twice,
    recomputes,
    recomputes_reentrant,
    remembers,
    softens,
)

REASONS: dict[Callable[[Any, Tensor], Tensor], str] = {
    decides: r"Block.forward cannot be traced: it decides by the value .* \(models.py, line \d+\)",
    draws: "draws random numbers",
    draws_tensors: "it computes aten.rand",
    remembers: "it changes the attribute seen",
    freezes: "grad mode",
    recomputes: "checkpoint",
    recomputes_reentrant: "checkpoint",
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
    assert re.search(REASONS[run], conversion.left[0].why), conversion.left[0].why


def test_tracing_leaves_no_trace() -> None:
    model = Block(remembers)
    convert(model)
    assert model.seen == []
    state = random.getstate()
    convert(Block(draws))
    assert random.getstate() == state


@pytest.mark.parametrize("activation", [nn.RReLU(), nn.Softmax(1), Gate(), nn.GLU(1)], ids=lambda a: type(a).__name__)
def test_activations_that_are_not_pointwise_are_left(activation: nn.Module) -> None:
    conversion = convert(nn.Sequential(nn.BatchNorm2d(4), activation))
    assert f"does not know {type(activation).__name__}" in conversion.left[0].why


SHARED = nn.BatchNorm2d(4)


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (lambda: nn.Sequential(OwnNorm(4), nn.ReLU()), "forward of its own"),
        (lambda: nn.Sequential(hooked(nn.BatchNorm2d(4)), nn.ReLU()), "it has hooks"),
        (lambda: nn.Sequential(nn.BatchNorm2d(4), hooked(nn.ReLU())), "ReLU, which follows, has hooks"),
        (lambda: nn.Sequential(nn.LazyBatchNorm2d(), nn.ReLU()), "lazy"),
        (lambda: nn.Sequential(BatchNormAct2d(4), nn.ReLU()), "converted already"),
        (lambda: nn.Sequential(SHARED, nn.ReLU(), SHARED, nn.ReLU()), "in the model twice: 0, 2"),
        (lambda: nn.BatchNorm2d(4), "it is the model itself"),
        (lambda: torch.fx.symbolic_trace(PreActivation()), "GraphModule"),
        (lambda: nn.ModuleList([nn.BatchNorm2d(4)]), "no forward was seen to call it"),
    ],
)
def test_batch_norms_that_cannot_be_replaced_are_left(model: Callable[[], nn.Module], why: str) -> None:
    conversion = convert(model())
    assert conversion.changed == ()
    assert why in conversion.left[0].why
    assert why in str(conversion)


def test_scripted_modules_are_left() -> None:
    scripted = torch.jit.script(nn.Sequential(nn.BatchNorm2d(4), nn.ReLU()))
    conversion = convert(nn.Sequential(conv(), scripted))
    assert [(left.path, left.why) for left in conversion.left] == [("1.0", "it is compiled by torch.jit")]


def test_a_strategy_that_an_activation_cannot_have_leaves_it() -> None:
    model = nn.Sequential(conv(), nn.BatchNorm2d(4), nn.ReLU(), conv(), nn.BatchNorm2d(4), nn.LeakyReLU(0.1))
    conversion = convert(model, strategy="inplace")
    assert [change.path for change in conversion.changed] == ["4"]
    assert "relu has no inverse" in conversion.left[0].why


def test_a_compiled_model_is_refused() -> None:
    model = nn.Sequential(nn.BatchNorm2d(4), nn.ReLU())
    model.compile(backend="eager")
    with pytest.raises(LowtideError, match="Convert first"):
        convert(model)
