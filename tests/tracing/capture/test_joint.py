"""Joint graphs: one of the whole loss."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lowtide import Workload, zoo
from lowtide.chains import keep_all, simulate
from lowtide.errors import TraceError
from lowtide.planning.programs.stages import Stages
from lowtide.tracing.capture.joint import is_tangent
from lowtide.tracing.capture.loss import capture_joint
from tests.contract.outcomes import assert_restored, snapshot
from tests.refusals import refused


class Branch(nn.Module):
    """Goes one way or the other by a value, in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.left, self.right = (nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x))
        return self.left(x) if x.sum() > 100 else self.right(x)


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
    work = Workload(Branch(), lambda model, x: model(x).square().mean(), torch.randn(4, 8))
    before = snapshot(work.model)
    with refused("not captured as one graph", kind=TraceError):
        capture_joint(work)
    assert_restored(work.model, before)
