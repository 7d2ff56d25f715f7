"""A backward pass without second derivatives refuses ``create_graph=True``."""

import pytest
import torch
from torch import nn
from torch._functorch import config as functorch

from lowtide.errors import LowtideError
from lowtide.nn import RandomizedLinear, fewbit


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("needs", ["input", "weights", "both"])
@functorch.patch(donated_buffer=False)  # or else torch may refuse earlier, by what it has cached
def test_second_derivatives_of_a_smooth_activation_are_refused(needs, compiled):
    linear, x = nn.Linear(4, 3), torch.randn(5, 4, requires_grad=needs != "weights")
    linear.requires_grad_(needs != "input")
    model = nn.Sequential(linear, fewbit.GELU())
    run = torch.compile(model, backend="aot_eager") if compiled else model
    wanted = x if x.requires_grad else linear.weight
    with pytest.raises(RuntimeError if compiled else LowtideError, match=r"double backward|gradients of gradients"):
        torch.autograd.grad(run(x).sum(), wanted, create_graph=True)[0].sum().backward()


def test_the_hessian_of_a_smooth_activation_is_refused():
    with pytest.raises(LowtideError, match="use torch's own activation"):
        torch.autograd.functional.hessian(lambda x: fewbit.GELU()(x).sum(), torch.randn(5))


GPU = torch.cuda.is_available()


DEVICE = "cuda" if GPU else "cpu"


def pair(features=(16, 8), *, bias=True, dtype=torch.float32, **how):
    plain = nn.Linear(*features, bias=bias, device=DEVICE, dtype=dtype)
    return plain, RandomizedLinear.from_linear(plain, **how)


@pytest.mark.parametrize("needs_input", [True, False])
def test_gradients_of_gradients_are_refused(needs_input):
    _, layer = pair()
    x = torch.randn(30, 16, device=DEVICE, requires_grad=needs_input)
    with pytest.raises(LowtideError, match="gradients of gradients"):  # the loss is linear: torch's guard is silent
        torch.autograd.grad(layer(x).sum(), x if needs_input else layer.weight, create_graph=True)
