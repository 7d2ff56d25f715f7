"""Both parts of a smoothed cross entropy, as torch computes them; losses with it are in test_chunked_loss.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide import Workload
from lowtide.techniques.rewrites.label_smoothing import Smoothing, smoothing_of
from lowtide.tracing.capture.loss import capture_loss

aten: Any = torch.ops.aten


def found(loss: Callable[[Tensor, Tensor], Tensor]) -> Smoothing | None:
    work = Workload(nn.Linear(4, 7), lambda m, batch: loss(m(batch[0]), batch[1]), (torch.randn(6, 4), torch.arange(6)))
    graph = capture_loss(work).graph.joint.module.graph
    nodes: dict[Any, Any] = {node.target: node for node in graph.nodes}
    slope = nodes[aten._log_softmax_backward_data.default].args[0]
    softmax, forward = nodes[aten._log_softmax.default], nodes[aten.nll_loss_forward.default]
    return smoothing_of(softmax, forward, nodes[aten.nll_loss_backward.default], slope)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("epsilon", [0.1, 0.25])
def test_torchs_own_is_read(reduction: str, epsilon: float) -> None:
    smoothing = found(lambda z, t: F.cross_entropy(z, t, label_smoothing=epsilon, reduction=reduction))
    assert smoothing is not None
    assert smoothing.epsilon == pytest.approx(epsilon)
    assert smoothing.loss.target is aten.add.Tensor
    assert smoothing.loss.meta["val"].shape == ()


def by_hand(rest: float, share: float) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(z: Tensor, target: Tensor) -> Tensor:
        logs = z.log_softmax(-1)
        return rest * F.nll_loss(logs, target) - share * logs.mean()

    return loss


@pytest.mark.parametrize(
    "loss",
    [
        lambda z, t: F.cross_entropy(z, t),
        lambda z, t: F.cross_entropy(z, t, torch.arange(7.0), label_smoothing=0.1),
        by_hand(0.9, 0.1),
        by_hand(1.0, 0.1),
    ],
    ids=["none", "class weights", "by hand", "other shares"],
)
def test_anything_else_is_not_read(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    assert found(loss) is None
