"""Writes through ``.data``, which autograd does not count, are seen in the first calls of a layer."""

import copy

import pytest
import torch
from torch import nn

from lowtide import LowtideError
from lowtide.nn import BatchNormAct2d, BatchRenormAct2d
from lowtide.nn.hidden_writes import read
from tests.nn.plain import pair
from tests.nn.raising import raises


class Written(nn.Module):
    """Writes through ``.data`` into what a layer gave, before or between those who read it."""

    def __init__(self, layer, where):
        super().__init__()
        self.layer, self.where = layer, where
        self.first, self.second = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)

    def forward(self, x):
        z = self.layer(x)
        if self.where == "before":
            z.data.clamp_(max=0.1)
        y = self.first(z)
        if self.where == "between":
            z.data.mul_(2)
        return y + self.second(z[:, :, ::1])


@pytest.mark.parametrize("strategy", ["auto", "checkpoint", "checkpoint_xhat"])
@pytest.mark.parametrize("where", ["before", "between"])
def test_a_write_through_data_gives_the_gradients_of_a_plain_step(where, strategy):
    layer, plain = pair(strategy, "silu")
    torch.manual_seed(0)
    model = Written(layer, where)
    other = copy.deepcopy(model)
    other.layer = plain
    for _ in range(4):
        x = torch.randn(5, 4, 3, 3)
        actual = []
        for net in (model, other):
            net.zero_grad()
            net(x).square().sum().backward()
            actual.append([p.grad.clone() for p in (*net.first.parameters(), *net.second.parameters())])
        torch.testing.assert_close(*actual)


def test_a_write_through_data_into_an_in_place_layer_is_an_error():
    layer, _ = pair("inplace", "leaky_relu")
    z = layer(torch.randn(5, 4, 3, 3, requires_grad=True))
    z.data.clamp_(max=0.1)
    with raises(LowtideError, "output", "strategy='inplace'"):
        z.sum().backward()


@pytest.mark.parametrize("make", [BatchNormAct2d, BatchRenormAct2d])
def test_later_calls_are_not_checked(make, monkeypatch):
    layer = make(4, "silu", "checkpoint")
    model, reads = nn.Sequential(layer, nn.Conv2d(4, 4, 1)), []
    monkeypatch.setattr(torch, "hash_tensor", lambda tensor, plain=torch.hash_tensor: reads.append(1) or plain(tensor))
    counts = []
    for _ in range(4):
        model(torch.randn(5, 4, 3, 3)).sum().backward()
        counts.append(len(reads))
    assert counts[0] > 0
    assert counts[1] == counts[2] == counts[3]


def test_values_are_summed_in_single_precision_at_least():
    """Autocast on a GPU widens sums, but not in the hooks where values are read again."""
    assert read(torch.ones(257, dtype=torch.bfloat16))[1] == 257


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_autocast_is_not_taken_for_a_write(device):
    layer = BatchNormAct2d(4, "relu", "checkpoint")
    model = nn.Sequential(nn.Conv2d(4, 4, 1), layer, nn.Conv2d(4, 4, 1)).to(device)
    for _ in range(2):
        with torch.autocast(device, dtype=torch.bfloat16):
            y = model(torch.randn(64, 4, 16, 16, device=device))
        y.float().sum().backward()
    assert not layer.calls.is_written
