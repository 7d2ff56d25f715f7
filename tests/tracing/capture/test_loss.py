"""Captures of a loss: what they leave behind, and losses that log."""

from __future__ import annotations

import contextlib
import gc
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lowtide import Workload
from lowtide.errors import TraceError
from lowtide.tracing.capture.forward import capture_forward
from lowtide.tracing.capture.loss import capture_joint
from tests.models import squares

from .test_joint import branching


@pytest.mark.parametrize("model", [nn.Linear(8, 8), branching()], ids=["captured", "refused"])
@pytest.mark.parametrize("capture", [capture_joint, capture_forward])
def test_captures_of_a_batch_that_is_a_view_leave_no_fake_tensors(model: nn.Module, capture: Any) -> None:
    counts: list[int] = []
    for _ in range(3):
        work = Workload(model, squares, torch.randn(8, 8)[:4])
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
    works = [Workload(kind(8, 8), squares, torch.randn(4, 8)) for kind in (Talking, nn.Linear)]
    before = set(torch._dynamo.config.ignore_logging_functions)
    assert len({capture_joint(work).digest for work in works}) == 1
    assert torch._dynamo.config.ignore_logging_functions == before


def test_gpt2_of_transformers_is_captured() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 32, "n_positions": 8}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    work = Workload(model, lambda m, x: m(input_ids=x, labels=x).loss, torch.randint(32, (2, 8)))
    assert capture_joint(work).forward
