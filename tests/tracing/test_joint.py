"""Joint graphs: one of the whole loss, or several where it breaks."""

from __future__ import annotations

import contextlib
import gc
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lowtide import Workload, zoo
from lowtide.chains import keep_all, simulate
from lowtide.errors import TraceError
from lowtide.planning.stages import Stages
from lowtide.tracing.forward import capture_forward
from lowtide.tracing.joint import capture_joint, capture_joints
from tests.contract.outcomes import assert_restored, snapshot


class Branch(nn.Module):
    """Goes one way or the other by a value, in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.left, self.right = (nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x))
        return self.left(x) if x.sum() > 100 else self.right(x)


def test_a_loss_without_breaks_is_one_graph() -> None:
    work = zoo.small("lenet")
    (joint,) = capture_joints(work)
    assert joint.digest == capture_joint(work).digest


def test_a_branch_by_a_value_breaks_the_loss_into_graphs_each_a_chain() -> None:
    work = Workload(Branch(), lambda model, x: model(x).square().mean(), torch.randn(4, 8))
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


@pytest.mark.parametrize("model", [nn.Linear(8, 8), Branch()], ids=["captured", "refused"])
@pytest.mark.parametrize("capture", [capture_joint, capture_forward])
def test_captures_of_a_batch_that_is_a_view_leave_no_fake_tensors(model: nn.Module, capture: Any) -> None:
    counts: list[int] = []
    for _ in range(3):
        work = Workload(model, lambda model, x: model(x).square().mean(), torch.randn(8, 8)[:4])
        with contextlib.suppress(TraceError):
            capture(work)
        gc.collect()
        counts.append(sum(type(each) is FakeTensor for each in gc.get_objects()))
    assert counts[1] == counts[2]


logger = logging.getLogger(__name__)


class Talking(nn.Linear):
    """Logs in forward as transformers' models do, which add methods to every logger."""

    def forward(self, x: Tensor) -> Tensor:
        logger.warning_once("%s", x.shape)  # pyright: ignore[reportAttributeAccessIssue]
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("seen")
        logging.info("forward of %d", len(x))
        return super().forward(x)


def test_logging_calls_do_not_stand_in_the_way_of_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.Logger, "warning_once", logging.Logger.warning, raising=False)
    works = [
        Workload(kind(8, 8), lambda m, x: m(x).square().mean(), torch.randn(4, 8)) for kind in (Talking, nn.Linear)
    ]
    before = set(torch._dynamo.config.ignore_logging_functions)
    assert len({capture_joint(work).digest for work in works}) == 1
    assert torch._dynamo.config.ignore_logging_functions == before


def test_gpt2_of_transformers_is_captured() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 32, "n_positions": 8}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    work = Workload(model, lambda m, x: m(input_ids=x, labels=x).loss, torch.randint(32, (2, 8)))
    assert capture_joint(work).forward
