"""Batch norms that cannot be converted: each is left as it was, with a reason."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from lowtide.errors import LowtideError
from lowtide.nn import BatchNormAct2d
from lowtide.techniques.batchnorm import convert
from tests.techniques.batchnorm.converting import assert_converts, hooked
from tests.techniques.batchnorm.models import OwnNorm, PreActivation, ResNetBlock, Taps, TwoEnds, conv, image

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
        (lambda: torch.jit.script(nn.Sequential(nn.BatchNorm2d(4), nn.ReLU())), "it is compiled by torch.jit"),
    ],
)
def test_batch_norms_that_cannot_be_replaced_are_left(model: Callable[[], nn.Module], why: str) -> None:
    conversion = convert(model())
    assert conversion.changed == ()
    assert why in conversion.left[0].why
    assert why in str(conversion)


def test_a_strategy_that_an_activation_cannot_have_leaves_it() -> None:
    model = nn.Sequential(conv(), nn.BatchNorm2d(4), nn.ReLU(), conv(), nn.BatchNorm2d(4), nn.LeakyReLU(0.1))
    conversion = convert(model, strategy="inplace")
    assert [change.path for change in conversion.changed] == ["4"]
    assert "relu has no inverse" in conversion.left[0].why


def test_a_compiled_model_is_refused() -> None:
    model = nn.Sequential(nn.BatchNorm2d(4), nn.ReLU())
    model.compile(backend="eager")
    with pytest.raises(LowtideError) as refusal:
        convert(model)
    assert "compile" in str(refusal.value)


def test_the_shortcuts_batch_norm_is_left_as_the_residual() -> None:
    conversion = assert_converts(nn.Sequential(ResNetBlock(downsample=True), conv()), image(), fused=2, left=1)
    assert conversion.left[0].path == "0.downsample.1"
    assert "no activation follows; nothing to save" in conversion.left[0].why


def test_joins_can_be_left_out() -> None:
    conversion = assert_converts(ResNetBlock(), image(), fused=1, left=1, joins=0)
    assert conversion.left[0].path == "bn2"
    assert "joins=0" in conversion.left[0].why


def test_of_two_batch_norms_that_are_added_the_first_is_joined() -> None:
    conversion = assert_converts(TwoEnds(), image(), fused=1, left=1)
    assert conversion.changed[0].path == "right.1"
    assert "residual of right.1" in conversion.left[0].why


@pytest.mark.parametrize(("tap", "fused"), [(0, 2), (1, 1), (2, 2), (4, 1)])
def test_layers_of_a_sequential_that_are_called_one_by_one(tap: int, fused: int) -> None:
    assert_converts(Taps(tap), image(), fused=fused, left=2 - fused)
