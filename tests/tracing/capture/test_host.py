"""What a step computes, draws or copies on the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from lowtide.tracing.capture.host import needs_host


@pytest.mark.parametrize(
    ("loss", "is_needed"),
    [
        (lambda m, x: (m(x) * 2).sum(), False),
        (lambda m, x: (m(x) * torch.tensor(0.5, device="cpu")).sum(), False),  # a constant
        (lambda m, x: (m(x) * torch.rand((), device="cpu")).sum(), True),
        (lambda m, x: (m(x) + torch.arange(2.0, device="cpu").to(x.device)).sum(), True),
        (lambda m, x: m(x).cpu().sum(), True),
    ],
    ids=["device", "constant", "random", "copy", "result"],
)
def test_what_the_host_computes_is_not_recorded(loss: Any, is_needed: bool) -> None:
    model = nn.Linear(2, 2, device="meta")  # in place of a GPU
    batch = torch.empty(3, 2, device="meta")
    graph = make_fx(lambda w, b, x: loss(lambda x: F.linear(x, w, b), x), tracing_mode="fake")(
        model.weight, model.bias, batch
    )
    assert needs_host(graph.graph, "meta") == is_needed
