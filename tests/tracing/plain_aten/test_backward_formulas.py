"""Backward formulas that look at values are traced as a plain step runs them."""

import pytest
import torch

from lowtide import Workload
from lowtide.tracing import trace
from tests.tracing.allocator import allocated_peak
from tests.tracing.layers import Of, loss, mask

FORMULAS = {
    "max": torch.max,
    "min": torch.min,
    "median": torch.median,
    "prod": torch.prod,
    "prod along": lambda x: x.prod(1),
    "prod along, kept": lambda x: x.prod(0, keepdim=True),
    "cumprod": lambda x: x.cumprod(-1),
}


@pytest.mark.parametrize("parameter", [True, False], ids=["of a parameter", "of a result"])
@pytest.mark.parametrize("name", FORMULAS)
def test_formulas_that_look_at_values_are_traced_as_a_plain_step_runs_them(name, parameter):
    def function(x):
        return FORMULAS[name](x if parameter else x.sigmoid())

    torch.manual_seed(0)
    work = Workload(Of(function, (30, 40)), loss, [])
    real, fake = trace(work), trace(work, fake=True)
    plain = allocated_peak(work.model, loss, [], None)
    assert real.peak_bytes == plain
    assert fake.storage_peak_bytes == real.storage_peak_bytes


@pytest.mark.parametrize("name", ["prod", "prod along", "cumprod"])
def test_products_with_zeros_are_not_traced_too_low(name):
    work = Workload(Of(lambda x, keep: FORMULAS[name](x * keep), (30, 40)), loss, [mask(30, 40).float()])
    plain = allocated_peak(work.model, loss, work.batch, None)
    assert trace(work).peak_bytes >= plain - 2 * 30 * 40  # the plain step's mask of zeros is not traced


@pytest.mark.parametrize("parameter", [True, False], ids=["of a parameter", "of a result"])
def test_a_mask_filled_with_a_tensor_is_traced_as_a_plain_step_runs_it(parameter):
    def function(x, value, m):
        return (x if parameter else x.sigmoid()).masked_fill(m, value)

    work = Workload(Of(function, (30, 40), ()), loss, [mask(30, 40)])
    assert trace(work).peak_bytes == allocated_peak(work.model, loss, work.batch, None)


def test_zeros_that_nothing_holds_take_no_bytes():
    work = Workload(Of(lambda x: x.sgn(), (30, 40)), loss, [])
    real, fake = trace(work), trace(work, fake=True)
    assert real.peak_bytes == allocated_peak(work.model, loss, [], None)
    assert fake.storage_peak_bytes == real.storage_peak_bytes
