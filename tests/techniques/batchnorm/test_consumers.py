"""Readers of a batch norm's result: which activations and sums are recognised."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide.nn import BatchNormAct2d
from lowtide.techniques.batchnorm import convert
from tests.techniques.batchnorm.converting import assert_converts
from tests.techniques.batchnorm.models import Gate, HardSwish, Written, applied, conv, image, joined


@pytest.mark.parametrize("activation", [nn.RReLU(), nn.Softmax(1), Gate(), nn.GLU(1)], ids=lambda a: type(a).__name__)
def test_activations_that_are_not_pointwise_are_left(activation: nn.Module) -> None:
    conversion = convert(nn.Sequential(nn.BatchNorm2d(4), activation))
    assert f"does not know {type(activation).__name__}" in conversion.left[0].why


def test_a_pointwise_module_of_ones_own() -> None:
    assert_converts(nn.Sequential(conv(), nn.BatchNorm2d(4), HardSwish(), conv()), image(), fused=1)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "F.relu": F.relu,
    "F.relu in place": lambda x: F.relu(x, inplace=True),
    "torch.relu": torch.relu,
    "torch.relu_": torch.relu_,
    "x.relu": lambda x: x.relu(),
    "x.relu_": lambda x: x.relu_(),
    "F.leaky_relu": lambda x: F.leaky_relu(x, 0.3),
    "F.leaky_relu by name": lambda x: F.leaky_relu(input=x, negative_slope=0.3, inplace=True),
    "F.elu": lambda x: F.elu(x, 0.5, True),
    "F.silu": F.silu,
    "F.gelu": lambda x: F.gelu(x, approximate="tanh"),
    "F.hardswish": F.hardswish,
    "F.softplus": lambda x: F.softplus(x, 2.0),
    "F.relu6": F.relu6,
    "F.mish": F.mish,
    "torch.sigmoid": torch.sigmoid,
    "x.tanh": lambda x: x.tanh(),
    "F.threshold": lambda x: F.threshold(x, 0.1, 0.0),
    "x.hardshrink": lambda x: x.hardshrink(0.2),
    "F.tanhshrink": F.tanhshrink,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name: str) -> None:
    model = applied(FUNCTIONS[name])
    assert_converts(model, image(), fused=1)
    assert isinstance(model.bn, BatchNormAct2d)


@pytest.mark.parametrize(
    "add", [lambda y, r: r.add_(y), lambda y, r: operator.iadd(r, y), lambda y, r: torch.add(y, r, alpha=2)]
)
def test_sums_that_are_written_over_the_residual_or_scaled_are_left(add: Any) -> None:
    assert_converts(joined(add), image(), fused=0, left=1)


def test_a_join_is_not_moved_behind_a_write_to_its_input() -> None:
    model = Written().eval()
    x = image().float()
    wanted = model(x)
    conversion = convert(model)
    assert torch.equal(model(x), wanted)
    assert "may be written to" in conversion.left[0].why
