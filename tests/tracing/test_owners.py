"""Storages of a step carry the names of their owners."""

import torch
from torch import nn

from lowtide import Workload
from lowtide.tracing import trace


def labels(graph, category):
    return {s.label for s in graph.storages if s.category == category}


def test_tensors_from_before_the_step_are_named():
    model, criterion, outside = nn.BatchNorm1d(4, affine=False), nn.Linear(4, 1), nn.Parameter(torch.ones(4))
    model.scale = torch.ones(3)
    optimizer = torch.optim.Adam([outside, *criterion.parameters()])
    work = Workload(model, lambda m, x: criterion(m(x) * outside).mean(), torch.randn(8, 4), optimizer)
    graph = trace(work)
    assert {"running_mean", "running_var", "BatchNorm1d.scale", "Linear.weight of the loss"} <= labels(graph, "buffer")
    assert "parameter outside of the model" in labels(graph, "parameter")
    assert "parameter outside of the model.exp_avg" in labels(graph, "optimizer state")
    assert labels(graph, "input") == {"batch [8, 4]"}


def test_gradients_are_named_also_where_a_hook_frees_them():
    model, order = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), []

    def free(parameter):
        order.append(parameter.grad is not None)
        parameter.grad = None

    model[0].weight.register_post_accumulate_grad_hook(free)
    graph = trace(Workload(model, lambda m, x: m(x).mean(), torch.randn(8, 4)))
    assert labels(graph, "gradient") == {"0.weight.grad", "0.bias.grad", "1.weight.grad", "1.bias.grad"}
    assert order == [True]
    assert len(model[0].weight._post_accumulate_grad_hooks) == 1
