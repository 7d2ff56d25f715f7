"""Gradients that meet are added as a plain step adds them: in place where the engine holds the first alone."""

import functools

import pytest
import torch
from torch import nn

from lowtide import Workload
from lowtide.tracing import trace, tracer
from lowtide.tracing.fake.backward import backward
from tests.refusals import warned

ADDS = ("aten::add", "aten::add_")


def residual(model, x):
    return x + model.a(x).relu()


def held_by_another_node(model, x):
    k, h = model.b(x), model.a(x)
    c = h.cos()
    return (h + k).tanh() + c


def first_is_a_view(model, x):
    h = model.a(x)
    return h.cos() + h.t().contiguous().sin().t() + h.view(-1).exp().view(h.shape)


def twice_the_same(model, x):
    h = model.a(x)
    return (h * h).tanh()


def used_three_times(model, x):
    return model.a(model.a(model.a(x)))


def formula_that_adds(model, x):
    h = model.a(x)
    variance, mean = torch.var_mean(h, dim=1, keepdim=True)
    return h.sin() * variance + mean * h


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2, x * 3

    @staticmethod
    def backward(ctx, left, right):
        return torch.add(2 * left, 3 * right)


def custom_function_that_adds(model, x):
    h = model.a(x)
    left, right = _Sum.apply(h)
    return left.sin() + right.cos() + h


def broadcast(model, x):
    h = model.a(x)
    return h + h.mean(dim=0) * h.sum()


CASES = (
    residual,
    held_by_another_node,
    first_is_a_view,
    twice_the_same,
    used_three_times,
    formula_that_adds,
    custom_function_that_adds,
    broadcast,
)


def workload(forward):
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)})
    model.__class__ = type(
        "Named", (nn.ModuleDict,), {"a": property(lambda m: m["a"]), "b": property(lambda m: m["b"])}
    )
    return Workload(model, lambda m, x: forward(m, x).mean(), torch.randn(8, 8))


def plain_adds(work):
    """The additions of a plain backward pass, in order, as torch.profiler names them."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as seen:
        work.compute_loss().backward()
    ops = [event for event in seen.events() if event.name in ADDS and _in_backward(event)]
    return [event.name for event in sorted(ops, key=lambda event: event.time_range.start)]


def _in_backward(event):
    while event is not None:
        if event.name.startswith("autograd::engine"):
            return True
        event = event.cpu_parent
    return False


def traced_adds(work, **options):
    names = [op.name.rpartition(".")[0] for op in trace(work, **options).ops if op.phase == "backward"]
    return [name for name in (name.replace(".", "::") for name in names) if name in ADDS]


@pytest.mark.parametrize("forward", CASES, ids=lambda case: case.__name__)
def test_a_trace_adds_gradients_as_a_plain_step_does(forward, monkeypatch):
    work = workload(forward)
    expected = plain_adds(work)
    assert traced_adds(work) == expected
    assert traced_adds(work, fake=True) == expected
    monkeypatch.setattr(tracer, "_backward", lambda losses, recorder: backward(losses.pop(), recorder.visit))
    assert traced_adds(work, fake=True) == expected


def test_both_ways_of_adding_are_in_the_cases():
    seen = {name for forward in CASES for name in plain_adds(workload(forward))}
    assert seen == set(ADDS)


def test_a_gradient_that_a_hook_keeps_is_not_written_over():
    kept = []

    def forward(model, x):
        h = model.a(x)
        c = h + 1.0
        c.register_hook(kept.append)
        return c.tanh() + h.sin()

    work = workload(forward)
    expected = plain_adds(work)
    plain = kept.pop().clone()
    kept.clear()
    with warned("tanh_backward [8, 8]"):
        assert traced_adds(work) == expected
    assert torch.equal(kept[0], plain)


def test_a_hook_that_adds_in_c_does_not_change_what_it_adds():
    noise = torch.ones(8, 8)

    def forward(model, x):
        h = model.a(x)
        h.register_hook(functools.partial(torch.add, noise))
        return h.sin() + h.cos()

    trace(workload(forward))
    assert torch.equal(noise, torch.ones(8, 8))
