"""Modelled seconds, from operations that are counted by hand."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from lowtide import Workload
from lowtide.profiling.devices import find_device
from lowtide.profiling.roofline import model_seconds, op_seconds, operations
from lowtide.tracing import trace


def ops_of(model, *shape):
    graph = trace(Workload(model, lambda m, x: m(x).mean(), torch.randn(*shape)), fake=True)
    return graph, {op.name.split(".")[1]: op for op in reversed(graph.ops)}


def test_products_and_convolutions_count_two_operations_for_each_product():
    _, ops = ops_of(nn.Linear(32, 64), 8, 32)
    assert operations(ops["addmm"]) == 2 * 8 * 32 * 64
    assert operations(ops["mean"]) == 0
    _, ops = ops_of(nn.Conv2d(3, 16, 3, padding=1), 2, 3, 8, 8)
    assert operations(ops["convolution"]) == 2 * (2 * 16 * 8 * 8) * (3 * 3 * 3)
    assert operations(ops["convolution_backward"]) == operations(ops["convolution"])  # the input needs no gradient


def test_an_op_takes_the_larger_of_arithmetic_and_bandwidth():
    graph, ops = ops_of(nn.Linear(32, 64), 8, 32)
    device, op = find_device("h200"), ops["addmm"]
    moved = sum(v.bytes for v in (*op.inputs, *op.outputs))
    assert op_seconds(op, device) == device.launch_seconds + moved / device.bandwidth
    slow = replace(device, rates={"float32": 1.0})
    assert op_seconds(op, slow) == device.launch_seconds + operations(op)
    assert all(math.isnan(each.seconds) for each in graph.ops)
    assert not any(math.isnan(each.seconds) for each in model_seconds(graph))
    timed = replace(graph, ops=tuple(replace(each, seconds=7.0) for each in graph.ops))
    assert sum(each.seconds for each in model_seconds(timed)) == pytest.approx(7 * len(graph.ops))
