"""Joint graphs: one of the whole loss, or several where it breaks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lowtide import Workload, zoo
from lowtide.chains import keep_all, simulate
from lowtide.planning.programs.stages import Stages
from lowtide.tracing.capture.loss import capture_joint, capture_joints
from tests.contract.outcomes import assert_restored, snapshot
from tests.models import Call, blocks, squares


def branching() -> Call:
    """Goes one way or the other by a value, in the middle."""

    def branch(m: Any, x: Tensor) -> Tensor:
        x = m.norm(m.first(x))
        return m.left(x) if x.sum() > 100 else m.right(x)

    first, left, right = blocks(3, 8)
    return Call(branch, first=first, left=left, right=right, norm=nn.BatchNorm1d(8))


def test_a_loss_without_breaks_is_one_graph() -> None:
    work = zoo.small("lenet")
    (joint,) = capture_joints(work)
    assert joint.digest == capture_joint(work).digest


def test_a_branch_by_a_value_breaks_the_loss_into_graphs_each_a_chain() -> None:
    work = Workload(branching(), squares, torch.randn(4, 8))
    before = snapshot(work.model)
    joints = capture_joints(work)
    assert_restored(work.model, before)
    names = [[str(node.target) for node in joint.forward] for joint in joints]
    assert [sum("addmm" in name for name in graph) for graph in names] == [1, 1, 0]
    assert any("batch_norm" in name for name in names[0])
    assert any("mean" in name for name in names[2])  # the loss, which the model returns to
    for joint in joints:
        chain = Stages(joint).chain(lambda node: 1.0)
        assert simulate(chain, keep_all(chain)).peak_bytes > 0
