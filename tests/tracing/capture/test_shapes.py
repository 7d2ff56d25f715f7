"""A joint graph with symbols for sizes gives the graphs that captures of single shapes give."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from lowtide import Workload
from lowtide.compat.dynamo import aot_autograd, default_partition, make_boxed
from lowtide.compat.symbols import varying
from lowtide.tracing.capture.loss import CompiledLoss, capture_joint
from lowtide.tracing.capture.shapes import SymbolicJoint
from lowtide.zoo.gpt2 import GPT2
from tests.models import squares
from tests.soak import in_soak


def gpt2() -> Workload:
    model = GPT2(layers=1, width=16, heads=2, vocab=64, block_size=64)
    return Workload(model, lambda m, x: F.cross_entropy(m(x).flatten(0, 1), x.flatten()), torch.ones(4, 20).long())


def images() -> Workload:
    norm = nn.BatchNorm2d(8)
    parts = (nn.Conv2d(3, 8, 3, padding=1), norm, nn.ReLU(True), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, stride=2))
    rest = (nn.GroupNorm(2, 8), nn.SiLU(), nn.Dropout(0.1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
    model = nn.Sequential(*parts, *rest)
    return Workload(model, squares, torch.randn(4, 3, 28, 28))


def sized(model: nn.Module, x: Tensor) -> Tensor:
    """A number that is made of sizes, and a window of half the length."""
    return model(x[:, : x.shape[1] // 2]).square().sum() / (x.shape[0] * x.shape[1] + 1)


def halves() -> Workload:
    return Workload(nn.Linear(8, 8), sized, torch.randn(4, 20, 8))


def symbolic(work: Workload, dims: tuple[int, ...]) -> tuple[SymbolicJoint, Callable[[Any], list[int]]]:
    """The graph of a step, and the sizes that Dynamo passes to it for a batch."""
    joints: list[SymbolicJoint] = []
    calls: list[list[int]] = []

    def backend(module: fx.GraphModule, inputs: Any) -> Any:
        def partition(joint: fx.GraphModule, given: Any, *, num_fwd_outputs: int, **_: Any) -> Any:
            joints.append(SymbolicJoint(joint, num_fwd_outputs, ()))
            return default_partition(joint, given, num_fwd_outputs=num_fwd_outputs)

        compilers = {"fw_compiler": lambda g, _: make_boxed(g), "bw_compiler": lambda g, _: make_boxed(g)}
        whole = aot_autograd(**compilers, partition_fn=partition)(module, inputs)

        def run(*given: Any) -> Any:
            calls.append([each for each in given if isinstance(each, int)])
            return whole(*given)

        return run

    loss = CompiledLoss(work, backend)

    def sizes_of(batch: Any) -> list[int]:
        with varying((batch, dim) for dim in dims):
            loss(batch)
        assert len(joints) == 1
        return calls[-1]

    sizes_of(work.batch)
    return joints[0], sizes_of


ODD = (23, 23) if torch.__version__ >= "2.13" else (26, 24)


@pytest.mark.parametrize(
    ("make", "dims", "shapes"),
    [
        (gpt2, (0, 1), [(6, 33), *in_soak([(3, 20)])]),
        (images, (0,), [(7, 3, 28, 28), *in_soak([(4, 3, 28, 28)])]),
        (images, (2, 3), [(4, 3, *ODD), *in_soak([(4, 3, 30, 30)])]),
        (halves, (0, 1), [(4, 20, 8), (3, 31, 8)]),
    ],
)
def test_the_graph_of_a_shape_is_that_of_its_own_capture(
    make: Callable[[], Workload], dims: tuple[int, ...], shapes: list[tuple[int, ...]]
) -> None:
    gc.collect()  # layers of other tests would take their hooks along in the middle of a capture
    work = make()
    whole, sizes_of = symbolic(work, dims)
    for shape in shapes:
        batch = work.batch.new_ones(shape)
        joint = whole.at(sizes_of(batch))
        alone = capture_joint(replace(work, batch=batch))
        assert joint.digest == alone.digest
        assert [str(node) for node in joint.forward] == [str(node) for node in alone.forward]
