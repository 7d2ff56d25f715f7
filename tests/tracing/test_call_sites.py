"""Ops and saved values know their module and the user's line."""

import os

import pytest
import torch
from torch import nn

import lowtide
from lowtide import Workload, zoo
from lowtide.tracing import trace
from lowtide.tracing.call_sites import is_library, running_modules, short_name


def test_the_saved_tensors_of_a_linear_layer_are_listed_with_their_makers():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    graph = trace(Workload(model, lambda model, x: model(x).mean(), torch.randn(3, 4)))
    inputs = [s for s in graph.saved if s.needed_in == "2" and s.category == "activation"]
    assert [(s.shape, s.made_by, s.made_in, s.needed_by) for s in inputs] == [
        ((3, 8), "aten.relu.default", "1", "aten.addmm.default")
    ]
    assert "test_call_sites.py:" in inputs[0].source  # the user's line, not torch's


def test_every_op_of_the_backward_pass_knows_its_module():
    graph = trace(zoo.small("gpt2"))
    unknown = [op for op in graph.ops if op.phase == "backward" and not op.module]
    total = [op for op in graph.ops if op.phase == "backward"]
    assert len(unknown) < 0.1 * len(total)  # the loss itself is not a module


def test_the_zoo_is_user_code_and_the_rest_of_lowtide_is_not():
    folder = os.path.dirname(lowtide.__file__)
    files = (torch.__file__, os.path.join(folder, "workload.py"), os.path.join(folder, "zoo", "gpt2.py"), __file__)
    assert [is_library(file) for file in files] == [True, True, False, False]
    assert short_name("aten.convolution.default") == "convolution"


def test_running_modules_are_known_also_where_one_fails():
    class Failing(nn.Module):
        def forward(self, x):
            seen.append(list(running))
            raise ValueError("on purpose")

    running, seen = [], []
    model = nn.Sequential(nn.Identity(), Failing())
    for skip, expected in ((set(), ["", "1"]), ({id(model)}, ["1"])):
        with running_modules(running, model, skip), pytest.raises(ValueError, match="on purpose"):
            model(torch.ones(1))
        assert (seen.pop(), running) == (expected, [])
    assert not model._forward_hooks
