"""The figures of a profile add up."""

import json

import pytest
import torch
from torch import nn

from lowtide import Workload, zoo
from lowtide.profiling import profile


@pytest.fixture(scope="module")
def resnet():
    return profile(zoo.small("resnet18"))


def mean_loss(model, batch):
    return model(batch).mean()


def test_the_categories_add_up_to_the_allocated_peak(resnet):
    assert sum(resnet.by_category.values()) == resnet.peak_bytes


def test_the_allocated_peak_is_not_below_the_storage_peak(resnet):
    assert resnet.peak_bytes >= resnet.storage_peak_bytes > resnet.static_bytes


def test_what_is_alive_at_the_peak_adds_up(resnet):
    workspace = resnet.graph.ops[resnet.peak_op].workspace_bytes
    assert sum(s.bytes for s in resnet.alive_at_peak) + workspace == resnet.peak_bytes


def test_the_module_tree_adds_up(resnet):
    root = resnet.by_module[0]
    assert root.path == ""
    assert root.total.parameter_bytes == sum(p.nbytes for p in zoo.small("resnet18").model.parameters())
    assert root.total.parameter_bytes == sum(row.own.parameter_bytes for row in resnet.by_module)
    assert root.total.saved_bytes == sum(row.own.saved_bytes for row in resnet.by_module) == resnet.saved_bytes
    assert root.total.seconds == pytest.approx(resnet.seconds)


def test_the_phases_follow_each_other(resnet):
    starts = resnet.timeline.phase_starts
    assert starts["forward"] == 0 < starts["backward"] < starts["optimizer"] < len(resnet.graph.ops)


def test_the_saved_bytes_of_a_chain_of_relus_are_its_outputs():
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(32, 32, bias=False), nn.ReLU())))
    shown = profile(Workload(model, mean_loss, torch.randn(16, 32)))
    assert shown.saved_bytes == 4 * 16 * 32 * 4  # each ReLU's output serves it and the next layer


def test_json_is_json_and_keeps_the_figures(resnet):
    data = json.loads(json.dumps(resnet.to_json()))
    assert data["version"] == 1
    assert data["peak_bytes"] == resnet.peak_bytes
    assert len(data["ops"]) == len(data["timeline"]["allocated"]) == len(resnet.graph.ops)
    assert data["by_category"] == resnet.by_category


def test_printing_says_where_the_peak_is(resnet):
    text = str(resnet)
    assert "allocated peak" in text
    assert "the peak is in backward" in text


def test_comparing_shows_what_changed():
    small = profile(zoo.small("gpt2", batch=1))
    large = profile(zoo.small("gpt2", batch=4))
    change = large.compare(small)
    assert change.saved_bytes == large.peak_bytes - small.peak_bytes > 0
    assert change.rows()[0] == ("allocated peak", large.peak_bytes, small.peak_bytes)
    assert "before" in str(change)
