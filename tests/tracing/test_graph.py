"""A graph's figures, counted by hand on a step of four ops."""

import math

import numpy as np
import pytest

from lowtide.tracing.graph import CATEGORIES, Graph, Op, Saved, Storage, TensorView, handed_on


def op(index, phase, inputs=(), outputs=(), workspace=0):
    views = [tuple(TensorView(storage, (2,), (1,), "float32") for storage in group) for group in (inputs, outputs)]
    return Op(index, "aten.mm.default", phase, "", "", *views, "1", False, math.nan, workspace)


def storage(index, size, category, birth, death, device="cpu"):
    return Storage(index, size, device, "float32", category, birth, death, "", "block", "")


@pytest.fixture
def graph():
    """weight 0 and x 1 give 2, which the backward pass reads into the gradient 4; 3 is a temporary."""
    ops = (
        op(0, "forward", (0, 1), (2,), workspace=1000),
        op(1, "forward", (2,), (3,)),
        op(2, "backward", (2,), (4,)),
        op(3, "optimizer", (0, 4)),
    )
    storages = (
        storage(0, 100, "parameter", 0, 4),
        storage(1, 50, "input", 0, 4),
        storage(2, 30, "activation", 0, 3),
        storage(3, 8, "temporary", 1, 2),
        storage(4, 100, "gradient", 2, 4),
        storage(5, 7, "buffer", 0, 4, device="cuda"),
        storage(6, 16, "workspace", 0, 4),
    )
    saved = (Saved(2, (2,), "float32", 8, "activation", "", "", "", "block", ""),)
    return Graph(ops, storages, saved, (("", "Net"),), "cpu", fake=False, granularity=64)


def test_live_bytes_are_those_on_the_device_while_each_op_runs(graph):
    assert graph.live_bytes().tolist() == [180, 188, 280, 250]
    assert graph.live_bytes("parameter", "gradient").tolist() == [100, 100, 200, 200]
    allocated = graph.live_bytes(allocated=True)  # rounded up to 64, with workspaces
    assert allocated.tolist() == [128 + 64 + 64 + 64 + 1000, 384, 448, 384]
    assert np.array_equal(sum(graph.live_bytes(each, allocated=True) for each in CATEGORIES), allocated)


def test_peaks_and_static_bytes(graph):
    assert (graph.storage_peak_bytes, graph.peak_bytes, graph.peak_op) == (280, 1320, 0)
    assert graph.static_bytes == 128 + 64
    assert [each.id for each in graph.alive_at(2)] == [0, 4, 1, 2, 6]
    empty = Graph((), (), (), (), "cpu", fake=True)
    assert (empty.storage_peak_bytes, empty.peak_bytes, empty.peak_op) == (0, 0, 0)


def test_uses_of_storages_by_phase(graph):
    assert graph.phase_starts() == {"forward": 0, "backward": 2, "optimizer": 3}
    assert graph.last_forward_use == {0: 0, 1: 0, 2: 1, 3: 1}
    assert graph.first_backward_use == {2: 2}
    assert graph.gradient_ends == {4: 2}
    assert graph.savers == {2: {"block"}}
    assert [(each.storage, each.made_in) for each in handed_on(graph)] == [(2, "block")]


def test_a_signature_tells_ops_of_other_layouts_apart(graph):
    assert graph.ops[1].signature == "aten.mm.default(float32[2][1]; 1)"
    assert graph.ops[0].inputs[0].bytes == 8
    predicted = Graph((), (), (), (), "h200", fake=True)
    assert (predicted.tensor_device, predicted.rounded(0), predicted.rounded(5)) == ("cuda", 0, 5)
