"""Batch norm as ops of graphs: the values of PyTorch's own, op by op and as a compiler sees them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide.kernels.activations import FUSED, Activation
from lowtide.kernels.batchnorm_ops import ACTIVATION, DECOMPOSITIONS, STATISTICS
from tests.soak import each_value

SHAPES = {
    "NCHW": (6, 5, 7, 9),
    "NHWC": (6, 5, 7, 9),
    "rows": (24, 5),
    "sequences": (6, 5, 11),
    "in pieces": (64, 16, 32, 32),
    "one channel": (6, 1, 4, 4),
}
OPS = {"op": (STATISTICS, ACTIVATION), "decomposed": tuple(DECOMPOSITIONS[op] for op in (STATISTICS, ACTIVATION))}


def batch(name: str, dtype: torch.dtype = torch.float32) -> Tensor:
    torch.manual_seed(0)
    x = (3 * torch.randn(SHAPES[name]) + 2).to(dtype)
    return x.to(memory_format=torch.channels_last) if name == "NHWC" else x


def vectors(channels: int, count: int = 4, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.rand(channels, dtype=dtype) + 0.5 for _ in range(count)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("how", OPS)
def test_values_and_running_statistics_are_pytorchs(how: str, name: str, dtype: torch.dtype) -> None:
    statistics, activation = OPS[how]
    x = batch(name, dtype)
    weight, bias, mean, var = vectors(x.shape[1], dtype=dtype)
    given = mean.clone(), var.clone()
    mu, invstd, moved_mean, moved_var = statistics(x, mean, var, 0.3, 1e-3)
    assert torch.equal(mean, given[0])  # the caller's, which only the end of forward writes
    assert torch.equal(var, given[1])
    expected = F.batch_norm(x, *given, weight, bias, training=True, momentum=0.3, eps=1e-3)
    actual = activation(x, mu, invstd, weight, bias, None, "identity", [])
    torch.testing.assert_close((actual, moved_mean, moved_var), (expected, *given))
    assert actual.stride() == x.stride()
    assert torch.equal(activation(x, mu, invstd, weight, bias, None, "identity", []), actual)  # recomputed
    again = statistics(x, None, None, 0.3, 1e-3)
    assert torch.equal(again[0], mu)
    assert torch.equal(again[1], invstd)
    assert [each.shape for each in again[2:]] == [mean.shape, var.shape]  # bytes that a program counts


@pytest.mark.parametrize("how", OPS)
@pytest.mark.parametrize(("shape", "name"), each_value(("NCHW", "in pieces"), FUSED))
def test_residual_and_activation_are_applied_as_by_ops_of_their_own(shape: str, how: str, name: str) -> None:
    statistics, activation = OPS[how]
    x = batch(shape)
    residual = torch.randn_like(x)
    weight, bias, *_ = vectors(x.shape[1])
    mu, invstd, *_ = statistics(x, None, None, 0.1, 1e-5)
    known = Activation.of(name)
    for other in (None, residual):
        y = F.batch_norm(x, None, None, weight, bias, training=True)
        expected = known(y if other is None else y + other)
        actual = activation(x, mu, invstd, weight, bias, other, name, list(known.numbers))
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("how", OPS)
def test_bfloat16_keeps_statistics_in_32_bits(how: str) -> None:
    statistics, activation = OPS[how]
    x = batch("NCHW", torch.bfloat16)
    weight, bias, mean, var = vectors(x.shape[1])
    expected = F.batch_norm(x, mean.clone(), var.clone(), weight, bias, training=True)
    mu, invstd, *moved = statistics(x, mean, var, 0.1, 1e-5)
    assert {each.dtype for each in (mu, invstd, *moved)} == {torch.float32}
    torch.testing.assert_close(activation(x, mu, invstd, weight, bias, None, "identity", []), expected)


def test_without_weight_and_bias() -> None:
    x = batch("NCHW")
    for statistics, activation in OPS.values():
        mu, invstd, *_ = statistics(x, None, None, 0.1, 1e-5)
        expected = F.batch_norm(x, None, None, training=True)
        torch.testing.assert_close(activation(x, mu, invstd, None, None, None, "identity", []), expected)


@pytest.mark.parametrize("name", SHAPES)
def test_fake_results_lie_as_real_ones(name: str) -> None:
    x = batch(name, torch.bfloat16)
    weight, bias, mean, var = vectors(x.shape[1])
    vectors_of_x = STATISTICS(x, mean, var, 0.1, 1e-5)
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (STATISTICS, (x, mean, var, 0.1, 1e-5)),
        (ACTIVATION, (x, *vectors_of_x[:2], weight, bias, x.clone(), "relu", [])),
    ]
    for op, args in calls:
        torch.library.opcheck(op, args, test_utils=("test_schema", "test_faketensor"))
