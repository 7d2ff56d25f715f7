"""Logits computed on demand: chunks for cross entropy, whole logits for any other use, and the head's gradients."""

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks

from lowtide.errors import LowtideError
from lowtide.nn.lazy_logits import LazyLogits, lazy_logits
from tests.nn.raising import raises

TARGET = torch.arange(6) % 9
USES = {
    "cross entropy": (lambda z: F.cross_entropy(z.view(-1, 9), TARGET), True),
    "sliced and cast": (lambda z: F.cross_entropy(z[:, 1:].reshape(-1, 9).float(), TARGET[2:]), True),
    "classes second": (lambda z: F.cross_entropy(z.transpose(1, 2), TARGET.view(2, 3)), True),
    "another op": (lambda z: z.exp().sum(), False),
    "both": (lambda z: F.cross_entropy(z.flatten(0, 1), TARGET) + z.square().mean(), False),
}


def head_and_input():
    torch.manual_seed(0)
    return nn.Linear(4, 9), torch.randn(2, 3, 4, requires_grad=True)


@pytest.mark.parametrize("name", USES)
def test_any_use_gives_the_heads_result_and_gradients(name):
    (head, x), (use, in_chunks) = head_and_input(), USES[name]
    inputs = [x, *head.parameters()]
    logits = lazy_logits(x, head)
    assert isinstance(logits, LazyLogits)
    assert (logits.shape, logits.dtype, logits.requires_grad) == ((2, 3, 9), torch.float32, True)
    value, expected = use(logits), use(head(x))
    assert (logits.lazy.source.whole is None) == in_chunks
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(torch.autograd.grad(value, inputs), torch.autograd.grad(expected, inputs))


def test_without_gradients_logits_are_whole():
    head, x = head_and_input()
    with torch.no_grad():
        assert type(lazy_logits(x, head)) is torch.Tensor


@pytest.mark.parametrize("fused", [False, True])
def test_logits_whose_weight_an_optimizer_stepped_are_refused(fused):
    """A fused step raises no version counter."""
    head, x = head_and_input()
    logits = lazy_logits(x, head, path="model.head")
    F.cross_entropy(logits.view(-1, 9), TARGET).backward()
    torch.optim.SGD(head.parameters(), lr=0.1, fused=fused).step()
    with raises(LowtideError, "model.head"):
        logits.exp()


def test_hooks_on_optimizers_live_as_long_as_logits_do():
    head, x = head_and_input()
    gc.collect()
    before = len(_global_optimizer_post_hooks)
    logits = lazy_logits(x, head)
    assert len(_global_optimizer_post_hooks) == before + 1
    del logits
    gc.collect()
    assert len(_global_optimizer_post_hooks) == before
