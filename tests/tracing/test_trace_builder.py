"""A frozen graph: recomputed ops, and tensors that no op made."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lowtide import Workload
from lowtide.tracing import trace
from tests.models import Call
from tests.tracing.layers import mean_loss


def test_recomputed_ops_are_marked_and_counted_as_activations_while_they_live():
    block = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    model = Call(lambda m, x: checkpoint(m.a, x, use_reentrant=False), a=block)
    graph = trace(Workload(model, mean_loss, torch.randn(96, 64)))
    again = [op for op in graph.ops if op.recompute]
    assert [(op.name, op.module) for op in again] == [("aten.addmm.default", "a.0"), ("aten.tanh.default", "a.1")]
    made = {value.storage for op in again for value in op.outputs}
    assert {graph.storages[index].category for index in made} >= {"activation"}
    assert all(op.phase == "backward" for op in again)


def test_a_tensor_that_the_loss_uses_is_there_before_the_step():
    mask = [torch.ones(64)]  # held by none of the modules
    work = Workload(nn.Linear(64, 64), lambda model, x: (model(x) * mask[0]).mean(), torch.randn(8, 64))
    graph = trace(work)
    held = [s for s in graph.storages if s.label == "held beside model and batch"]
    assert [(s.bytes, s.category, s.birth) for s in held] == [(256, "buffer", 0)]
