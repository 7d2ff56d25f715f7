"""Joint graphs: one of the whole loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lowtide import Workload, zoo
from lowtide.chains import keep_all, simulate
from lowtide.errors import TraceError
from lowtide.planning.programs.stages import Stages
from lowtide.tracing.capture.joint import is_tangent
from lowtide.tracing.capture.loss import capture_joint
from tests.contract.outcomes import assert_restored, snapshot
from tests.models import Call, blocks, squares
from tests.refusals import refused


def branching() -> Call:
    """Goes one way or the other by a value, in the middle."""

    def branch(m: Any, x: Tensor) -> Tensor:
        x = m.norm(m.first(x))
        return m.left(x) if x.sum() > 100 else m.right(x)

    first, left, right = blocks(3, 8)
    return Call(branch, first=first, left=left, right=right, norm=nn.BatchNorm1d(8))


def test_a_loss_is_one_graph_of_forward_and_backward_whose_stages_are_a_chain() -> None:
    joint = capture_joint(zoo.small("lenet"))
    (tangent,) = joint.tangents
    assert is_tangent(tangent)
    assert not any(map(is_tangent, joint.primals))
    assert len(joint.gradients) == len(joint.primals)
    assert joint.digest == capture_joint(zoo.small("lenet")).digest
    chain = Stages(joint).chain(lambda node: 1.0)
    assert simulate(chain, keep_all(chain)).peak_bytes > 0


def test_a_branch_by_a_value_breaks_the_loss_which_is_refused_and_restored() -> None:
    work = Workload(branching(), squares, torch.randn(4, 8))
    before = snapshot(work.model)
    with refused("not captured as one graph", kind=TraceError):
        capture_joint(work)
    assert_restored(work.model, before)
