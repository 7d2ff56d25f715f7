"""A backward pass without second derivatives refuses ``create_graph=True``."""

import pytest
import torch
from torch import nn
from torch._functorch import config as functorch

from lowtide.errors import LowtideError
from lowtide.nn import LinearCrossEntropy, RandomizedLinear, fewbit
from tests.nn.raising import raises

TARGET = torch.arange(30) % 8
LAYERS = {
    "fewbit": (fewbit.GELU(), lambda layer, x: layer(x)),
    "randomized": (RandomizedLinear(16, 8), lambda layer, x: layer(x)),
    **{
        f"chunked {reduction}": (LinearCrossEntropy(16, 8, reduction=reduction), lambda layer, x: layer(x, TARGET))
        for reduction in ("mean", "sum", "none")
    },
}


@pytest.mark.parametrize("needs", ["input", "weights"])
@pytest.mark.parametrize("name", LAYERS)
def test_gradients_of_gradients_are_refused_where_the_loss_is_linear_too(name, needs):
    """There torch's own ``once_differentiable`` is silent."""
    layer, run = LAYERS[name]
    before = nn.Linear(16, 16).requires_grad_(needs == "weights")
    x = torch.randn(30, 16, requires_grad=needs == "input")
    with raises(LowtideError, "gradients of gradients"):
        torch.autograd.grad(run(layer, before(x)).sum(), x if needs == "input" else before.weight, create_graph=True)


@functorch.patch(donated_buffer=False)  # or else torch may refuse earlier, by what it has cached
def test_a_compiled_activation_refuses_them_too():
    x = torch.randn(5, 4, requires_grad=True)
    compiled = torch.compile(nn.Sequential(nn.Linear(4, 3), fewbit.GELU()), backend="aot_eager")
    with raises(RuntimeError, "double backward"):
        torch.autograd.grad(compiled(x).sum(), x, create_graph=True)[0].sum().backward()
