"""The backward pass in Python is torch's own, node by node."""

import pytest
import torch
from torch import nn

from lowtide import zoo
from lowtide.techniques.batchnorm import convert
from lowtide.tracing import trace, tracer
from lowtide.tracing.fake.backward import backward
from lowtide.workload import Workload
from tests.soak import in_soak


@pytest.mark.parametrize("name", ["lenet", "gpt2", "lstm", *in_soak(["resnet18", "densenet121", "unet"])])
def test_it_gives_the_ops_and_the_peak_of_torchs_engine(name, monkeypatch):
    work = zoo.small(name)
    expected = trace(work, fake=True)
    monkeypatch.setattr(tracer, "_backward", lambda losses, recorder: backward(losses.pop(), recorder.visit))
    graph = trace(work, fake=True)
    assert [op.name for op in graph.ops] == [op.name for op in expected.ops]
    assert graph.storage_peak_bytes == pytest.approx(expected.storage_peak_bytes, rel=1e-3)


@pytest.mark.parametrize("name", ["gpt2", *in_soak(["resnet18", "unet"])])
def test_its_gradients_are_torchs(name):
    work = zoo.small(name)
    for p in work.model.parameters():
        p.grad = None
    torch.manual_seed(0)
    work.compute_loss().backward()
    expected = [p.grad for p in work.model.parameters()]
    for p in work.model.parameters():
        p.grad = None
    torch.manual_seed(0)
    backward(work.compute_loss(), lambda node: None)
    for p, gradient in zip(work.model.parameters(), expected, strict=True):
        assert torch.equal(p.grad, gradient)


def test_broadcasting_and_mixed_dtypes_are_undone():
    a = nn.Parameter(torch.randn(4, 1))
    b = nn.Parameter(torch.randn(3, dtype=torch.float64))
    (a * b).sum().backward()
    expected = a.grad, b.grad
    a.grad = b.grad = None
    backward((a * b).sum(), lambda node: None)
    assert torch.equal(a.grad, expected[0])
    assert torch.equal(b.grad, expected[1])
    assert (a.grad.dtype, b.grad.dtype) == (torch.float32, torch.float64)


class _Pair(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx, left, right):
        return 2 * left + 3 * right + 0 * ctx.saved_tensors[0]


def test_an_unused_output_of_a_custom_function_gets_zeros():
    x = nn.Parameter(torch.randn(4))
    backward(_Pair.apply(x)[0].sum(), lambda node: None)
    assert torch.equal(x.grad, torch.full((4,), 2.0))


def test_custom_functions_in_a_row_free_what_they_saved(monkeypatch):
    def loss(model, x):
        for layer in model:
            x = layer(_Pair.apply(_Pair.apply(x)[1])[0]).square()
        return x.sum()

    work = Workload(nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))), loss, torch.randn(512, 8))
    expected = trace(work, fake=True)
    monkeypatch.setattr(tracer, "_backward", lambda losses, recorder: backward(losses.pop(), recorder.visit))
    graph = trace(work, fake=True)
    assert graph.storage_peak_bytes == expected.storage_peak_bytes
    assert all(ours.death <= torchs.death for ours, torchs in zip(graph.storages, expected.storages, strict=True))


def test_a_converted_model_frees_what_its_hooks_packed(monkeypatch):
    work = zoo.small("resnet18")
    with convert(work.model):
        expected = trace(work, fake=True)
        monkeypatch.setattr(tracer, "_backward", lambda losses, recorder: backward(losses.pop(), recorder.visit))
        graph = trace(work, fake=True)
    assert graph.storage_peak_bytes <= expected.storage_peak_bytes
    assert all(ours.death <= torchs.death for ours, torchs in zip(graph.storages, expected.storages, strict=True))


def test_a_custom_loss_keeps_its_graph():
    x = nn.Parameter(torch.randn(()))
    backward(_Pair.apply(_Pair.apply(x)[0])[1], lambda node: None)
    assert x.grad == 6
