"""Python numbers that autograd keeps are counted, as long as it keeps them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lowtide import Workload, apply, plan, profile
from lowtide.tracing import trace
from tests.engines.planned import smallest_budget
from tests.models import Then, squares
from tests.soak import in_soak
from tests.tracing.allocator import allocated_peak
from tests.tracing.layers import Of, loss, recomputed

STEPS = {
    "0.5 * x": lambda x: 0.5 * x,
    "x * 2": lambda x: x * 2,
    "x / 3": lambda x: x / 3,
    "x.mul_(2)": lambda x: (x + 1).mul_(2),
    "a chain": lambda x: (0.5 * x) * 2 / 3,
    "a number that is not kept": lambda x: 0.5 + x,
    "a constant's": lambda x: x + 0.5 * torch.ones(5),
    "a result that is dropped": lambda x: (0.5 * x, x.exp())[1],
    "a scalar overload": lambda x: F.scaled_dot_product_attention(x, x, x, torch.zeros(5, 5), dropout_p=0.5),
}


@pytest.mark.parametrize("name", STEPS)
def test_numbers_kept_for_backward_are_counted(name):
    work = Workload(Of(STEPS[name], (2, 5, 5)), loss, [])
    plain = allocated_peak(work.model, loss, [], None)
    assert trace(work).peak_bytes == plain
    assert trace(work, fake=True).storage_peak_bytes == trace(work).storage_peak_bytes


def test_numbers_kept_by_a_recomputed_forward_die_with_it():
    def blocks():
        return nn.Sequential(nn.Linear(16, 16), Then(lambda x: (0.5 * x.tanh()) * 2), nn.Linear(16, 16))

    work = Workload(nn.Sequential(*(recomputed(blocks()) for _ in range(4))), squares, torch.randn(20, 16))
    assert trace(work).peak_bytes == allocated_peak(work.model, squares, work.batch, None)


@pytest.mark.parametrize("engine", ["graph", *in_soak(["eager"])])
def test_a_step_with_numbers_keeps_the_smallest_budget_to_the_byte(engine):
    def block():
        return nn.Sequential(nn.Linear(16, 16), Then(lambda x: 0.5 * x.tanh() / 3))

    work = Workload(nn.Sequential(*(block() for _ in range(3))), squares, torch.randn(64, 16))
    plain = profile(work)
    budget = smallest_budget(work, plain, engine)
    with apply(plan(work, budget, profile=plain, engine=engine), work) as step:
        peak = allocated_peak(work.model, lambda _, batch: step.loss(batch), work.batch, None)
    assert peak <= budget
