"""The way from a product to a softmax, read off small graphs; losses with it are in test_chunked_loss.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from lowtide.techniques.rewrites.logits import Logits, Slice, logits_of

aten: Any = torch.ops.aten


def bias(*shape: int) -> Tensor:
    return torch.linspace(-1.0, 1.0, 7).expand(*shape, 7).clone()


def found(head: Callable[[Tensor], Tensor]) -> Logits | None:
    """Find the logits of a head on six rows, in sequences of three."""

    def gradient(x: Tensor, weight: Tensor) -> Tensor:
        x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
        logits = head((x @ weight.t()).view(2, 3, 7))
        loss = logits.reshape(-1, 7).log_softmax(-1)[:, 0].sum()
        return torch.autograd.grad(loss, [weight])[0]

    graph = make_fx(gradient, tracing_mode="fake")(torch.ones(6, 4), torch.ones(7, 4)).graph
    (softmax,) = graph.find_nodes(op="call_function", target=aten._log_softmax.default)
    (slope,) = graph.find_nodes(op="call_function", target=aten._log_softmax_backward_data.default)
    return logits_of(softmax.args[0], slope)


def test_a_cap_and_a_bias_are_read() -> None:
    way = found(lambda z: ((z + bias(1)) / 30.0).tanh() * 30.0)
    assert way is not None
    assert way.cap == 30.0
    assert way.bias is not None
    assert way.slice is None
    assert way.product.target is aten.mm.default
    assert way.gradient.meta["val"].shape == (6, 7)


def test_plain_logits_have_neither() -> None:
    way = found(lambda z: z.float())
    assert way is not None
    assert (way.cap, way.bias, way.slice) == (0.0, None, None)


def test_a_slice_of_sequences_names_the_positions_left_out() -> None:
    way = found(lambda z: z[:, 1:])
    assert way is not None
    assert way.slice == Slice(sequences=2, length=2, left_out=(1, 0))


@pytest.mark.parametrize(
    "head",
    [
        lambda z: z.exp(),
        lambda z: (z / 30.0).tanh() * 20.0,
        lambda z: (z / -30.0).tanh() * -30.0,
        lambda z: ((z / 3.0).tanh() * 3.0 / 9.0).tanh() * 9.0,
        lambda z: (z / 30.0).tanh() * 30.0 + bias(1),
        lambda z: z + bias(1) + bias(1),
        lambda z: z + bias(2, 3),
        lambda z: z * bias(1),
        lambda z: z[:, ::2],
        lambda z: z[1:],
    ],
    ids=["exp", "two numbers", "negative", "twice", "bias outside", "two biases", "full", "factor", "strided", "batch"],
)
def test_anything_else_is_not_read(head: Callable[[Tensor], Tensor]) -> None:
    assert found(head) is None
