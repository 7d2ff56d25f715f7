"""Seconds in compiled code: elementwise ops cost nothing where their readers are fused too."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import lowtide.kernels.dropout_mask  # noqa: F401  (registers its op)
from lowtide import Workload
from lowtide.kernels import batchnorm_ops
from lowtide.planning.programs.fused import fused_seconds, is_free, is_fused, readers
from lowtide.tracing.capture.joint import Joint, viewed
from lowtide.tracing.capture.loss import capture_joint
from tests.models import Call, squares

aten: Any = torch.ops.aten


def mixed(model: Any, x: Tensor) -> Tensor:
    """Elementwise ops that products read, that elementwise ops read, and that are read through views."""
    y = F.silu(model.norm(model.one(x))) * 3.0
    return model.two(y.view(-1, 8)).tanh()


@pytest.fixture(scope="module")
def joint() -> Joint:
    model = Call(mixed, one=nn.Linear(8, 8), two=nn.Linear(8, 8), norm=nn.LayerNorm(8))
    return capture_joint(Workload(model, squares, torch.randn(2, 4, 8)))


def only(joint: Joint, target: Any) -> fx.Node:
    (node,) = joint.module.graph.find_nodes(op="call_function", target=target)
    return node


@pytest.mark.parametrize(
    ("target", "fused"),
    [
        (aten.relu.default, True),
        (aten._to_copy.default, True),
        (aten.native_layer_norm.default, True),
        (torch.ops.lowtide.dropout_mask.default, True),
        (batchnorm_ops.ACTIVATION, True),
        (batchnorm_ops.STATISTICS, False),
        (aten.mm.default, False),
        (aten.convolution.default, False),
        (aten._softmax.default, False),
        (operator.getitem, False),
    ],
    ids=str,
)
def test_elementwise_ops_and_what_compiles_like_them_are_fused(target: Any, fused: bool) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    assert not is_fused(x)
    assert is_fused(graph.call_function(target, (x, x))) is fused


def test_readers_are_seen_through_views(joint: Joint) -> None:
    product = next(n for n in joint.forward if n.target is aten.mul.Tensor)
    direct = [user for user in product.users if viewed(user) is None]
    through = list(readers(product))
    assert all(viewed(reader) is None for reader in through)
    assert set(direct) < set(through)
    assert any(reader.target is aten.addmm.default for reader in through)


def test_fused_ops_between_fused_ops_take_no_time(joint: Joint) -> None:
    seconds = fused_seconds(joint, lambda _: 1.0)
    assert seconds(only(joint, aten.silu.default)) == 0.0  # a product by three and silu's backward read it
    assert seconds(next(n for n in joint.forward if n.target is aten.mul.Tensor)) == 1.0  # a linear layer reads it
    assert {seconds(node) for node in joint.forward if node.target is aten.addmm.default} == {1.0}


def test_seconds_are_never_more_than_alone(joint: Joint) -> None:
    alone = {node: float(place) for place, node in enumerate((*joint.forward, *joint.backward))}
    seconds = fused_seconds(joint, lambda node: alone[node])
    assert all(seconds(node) in (0.0, alone[node]) for node in alone)
    assert sum(map(seconds, alone)) < sum(alone.values())


def test_what_only_fused_ops_of_backward_read_is_free_to_recompute(joint: Joint) -> None:
    assert is_free(joint, only(joint, aten.tanh.default))
    product = next(n for n in joint.forward if n.target is aten.mul.Tensor)
    assert not is_free(joint, product)  # the gradient of a weight reads it
    assert not any(is_free(joint, node) for node in joint.forward if node.target is aten.addmm.default)
