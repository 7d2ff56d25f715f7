"""Tensors as bytes: dense parts and their storages."""

import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from lowtide import Workload
from lowtide.tracing import trace
from lowtide.tracing.dense_parts import address, flatten, leaves, parts
from tests.tracing.layers import mean_loss


def test_sparse_gradients_are_counted_by_their_parts():
    model = nn.Sequential(nn.Embedding(1000, 16, sparse=True), nn.Flatten(0), nn.Linear(64, 1))
    work = Workload(model, mean_loss, torch.randint(1000, (4,)), torch.optim.SGD(model.parameters(), lr=0.1))
    graph = trace(work)
    gradients = [s for s in graph.storages if s.label == "0.weight.grad"]
    assert sum(s.bytes for s in gradients) == 4 * 8 + 4 * 16 * 4  # indices and values, not 1000 rows
    assert trace(work, fake=True).storage_peak_bytes == graph.storage_peak_bytes


def test_tensors_are_made_of_dense_parts():
    x = torch.ones(4, 4)
    kinds = (x, TwoTensor(x, x.clone()), x.to_sparse(), x.to_mkldnn())
    assert [len(parts(each)) for each in kinds] == [1, 2, 2, 0]
    assert address(x[1:]) == address(x) != address(x.clone())


def test_an_ops_arguments_are_tensors_and_text():
    x, y = torch.ones(2), torch.zeros(3)
    tensors, text = flatten((x, [y, 2], [1, 2], None), {"dim": 0, "out": None})
    assert [id(t) for t in tensors] == [id(x), id(y)]
    assert text == "2 [1, 2] None dim= 0"
    assert [id(t) for t in leaves((x, [None, y]))] == [id(x), id(y)]
