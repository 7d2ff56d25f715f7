"""The optimizer of a traced step has its state, and its owner's hooks see the step alone."""

import pytest
import torch
from torch import nn

from lowtide import Workload, zoo
from lowtide.tracing import trace
from tests.tracing.comparing import assert_same, snapshot
from tests.tracing.layers import mean_loss


@pytest.mark.parametrize("device", ["cpu", "h200"])
def test_tracing_a_fresh_optimizer_leaves_it_fresh(device):
    work = zoo.small("gpt2", optimizer="adamw")
    before = snapshot(work)
    trace(work, fake=True, device=device)
    assert_same(before, snapshot(work))
    trace(work)
    assert_same(before, snapshot(work))
    assert not work.optimizer.state


def test_unused_parameters_get_no_optimizer_state():
    model = nn.ModuleDict({"used": nn.Linear(8, 8), "unused": nn.Linear(100, 100)})
    work = Workload(
        model,
        lambda model, batch: model["used"](batch).mean(),
        torch.randn(2, 8),
        torch.optim.Adam(model.parameters()),
    )
    graph = trace(work)
    assert not [s for s in graph.storages if s.category == "optimizer state" and s.label.startswith("unused")]


def test_a_hook_on_the_optimizer_is_called_once():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters())
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    trace(Workload(model, mean_loss, torch.randn(3, 4), optimizer))
    assert calls == [1]


def test_sparse_adam_is_traced():
    model = nn.Sequential(nn.Embedding(100, 8, sparse=True))
    work = Workload(model, mean_loss, torch.randint(100, (4,)), torch.optim.SparseAdam(list(model.parameters())))
    graph = trace(work)
    assert sum(s.bytes for s in graph.storages if s.category == "optimizer state") >= 2 * 100 * 8 * 4
