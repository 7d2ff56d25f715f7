"""A converted model compiles to one graph, once for each mode, and trains as plain PyTorch does."""

from __future__ import annotations

import copy
from collections.abc import Generator

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from lowtide.techniques.batchnorm import convert
from tests.soak import in_soak
from tests.techniques.batchnorm.models import DenseBlock, ResNetBlock, Switched, image

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),  # Dynamo looks at it
    pytest.mark.filterwarnings("ignore:Using `torch.compile.module.` when there are global hooks:UserWarning"),
]


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Generator[None]:
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def like_torchvision(blocks: int) -> nn.Module:
    """A chain of torchvision's residual blocks, the first with a downsampling path."""
    torch.manual_seed(0)
    return nn.Sequential(*(ResNetBlock(downsample=index == 0) for index in range(blocks))).double()


def assert_trains_alike(model: nn.Module, plain: nn.Module, x: Tensor) -> None:
    """Outputs, gradients and buffers of several steps in each mode are plain PyTorch's."""
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for training in (True, False, True):
        model.train(training)
        plain.train(training)
        for _ in range(2):
            actual, wanted = compiled(x), plain(x)
            torch.testing.assert_close(actual, wanted)
            actual.square().mean().backward()
            wanted.square().mean().backward()
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, msg=lambda text, name=name: f"{name}: {text}")
    for ours, theirs in zip(model.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("joins", [2, *in_soak([1])])
def test_residual_blocks_are_one_graph_per_mode(joins: int) -> None:
    plain = like_torchvision(2)
    model = copy.deepcopy(plain)
    convert(model, joins=joins)
    assert_trains_alike(model, plain, image())
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 2  # training and evaluation


def test_code_learned_later_in_eager_mode_compiles_nothing_again() -> None:
    model, x = like_torchvision(1), image()
    convert(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    compiled(x)
    model.eval()
    model(x)
    with torch.no_grad():
        model.train()(x)
    compiled(x)
    assert counters["stats"]["unique_graphs"] == 1


def test_a_setting_changed_after_compiling_is_seen() -> None:
    plain, x = Switched().double().eval(), image()
    model = copy.deepcopy(plain)
    convert(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for scale in (1.0, 2.0):
        model.scale = plain.scale = scale
        torch.testing.assert_close(compiled(x), plain(x))


def test_a_forward_called_with_a_list_is_one_graph() -> None:
    plain, x = DenseBlock().double().eval(), image()
    model = copy.deepcopy(plain)
    convert(model)
    torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="eager")(x), plain(x))
