"""ATen writes in place where no dispatch mode is active; traces of a step do as well."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lowtide import Workload
from lowtide.tracing import trace
from tests.tracing.allocator import allocated_peak
from tests.tracing.layers import Of, On, integers, loss, mask, recomputed, transposed

ROWS = integers(64, below=40)
PICKS = integers(30, 40, below=40)


def linear(*, again=False):
    layer = nn.Sequential(transposed, nn.Linear(8, 400))
    return On(recomputed(layer) if again else layer, 16, 8, 8)


def attention(q, k, v, mask):
    return F.scaled_dot_product_attention(q, k, v, mask, dropout_p=0.5)  # with dropout no fused kernel takes a mask


def logits(**options):
    return lambda x, *others: F.binary_cross_entropy_with_logits(x, *others, **options)


def scaled(x, target):
    return logits(pos_weight=torch.full((40,), 2.0))(x, target)


STEPS = {
    "bias of a linear layer on a transposed input": (linear, []),
    "bias of a recomputed linear layer": (lambda: linear(again=True), []),
    "mask of an attention": (lambda: Of(attention, *[(2, 4, 16, 8)] * 3), [torch.zeros(16, 16)]),
    "x[rows]": (lambda: Of(lambda x, i: x[i], (40, 30)), [ROWS]),
    "index_select": (lambda: Of(lambda x, i: x.index_select(0, i), (40, 30)), [ROWS]),
    "gather": (lambda: Of(lambda x, i: x.gather(1, i), (30, 40)), [PICKS]),
    "take": (lambda: Of(lambda x, i: x.take(i), (30, 40)), [ROWS]),
    "trace": (lambda: Of(torch.trace, (30, 30)), []),
    "max": (lambda: Of(lambda x: x.max(1).values, (30, 40)), []),
    "median": (lambda: Of(lambda x: x.median(1).values, (30, 40)), []),
    "sort": (lambda: Of(lambda x: x.sort(1).values, (30, 40)), []),
    "topk": (lambda: Of(lambda x: x.topk(30).values, (30, 40)), []),
    "cummax": (lambda: Of(lambda x: x.cummax(1).values, (30, 40)), []),
    "aminmax": (lambda: Of(lambda x: torch.stack(x.aminmax()), (30, 40)), []),
    "atan2": (lambda: Of(torch.atan2, (30, 40), (30, 40)), []),
    "clamp by tensors": (lambda: Of(torch.clamp, (30, 40), (30, 40), (30, 40)), []),
    "bce with logits": (lambda: Of(logits(), (30, 40)), [torch.ones(30, 40)]),
    "bce with logits, not reduced": (lambda: Of(logits(reduction="none"), (30, 40)), [torch.ones(30, 40)]),
    "bce with weighted logits": (lambda: Of(scaled, (30, 40)), [torch.ones(30, 40)]),
    "bce with logits on both sides": (lambda: Of(logits(), (30, 40), (30, 40)), []),
    "bce on both sides": (lambda: Of(F.binary_cross_entropy, (30, 40), (30, 40)), []),
    "scatter_reduce": (lambda: Of(lambda x, y, i: x.scatter_reduce(1, i, y, "amax"), (30, 40), (30, 40)), [PICKS]),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_trace_writes_in_place_where_a_plain_step_does(name):
    if name == "aminmax" and torch.__version__ < "2.13":
        pytest.skip("torch 2.11 has no derivative of aminmax")
    make, batch = STEPS[name]
    torch.manual_seed(0)
    work = Workload(make(), loss, batch)
    real, fake = trace(work), trace(work, fake=True)
    assert real.peak_bytes == allocated_peak(work.model, loss, batch, None)
    assert fake.storage_peak_bytes == real.storage_peak_bytes
    assert [op.name for op in fake.ops] == [op.name for op in real.ops]


LINALG = {
    "inv": lambda x: torch.linalg.inv(x),
    "det": torch.linalg.det,
    "slogdet": lambda x: torch.linalg.slogdet(x).logabsdet,
    "solve": lambda x: torch.linalg.solve(x, x[:, :4]),
    "triangular": lambda x: torch.linalg.solve_triangular(x.tril(), x[:, :4], upper=False),
    "cholesky": lambda x: torch.linalg.cholesky(x @ x.mT),
}


@pytest.mark.parametrize("name", LINALG)
def test_linear_algebra_is_traced_to_the_byte(name):
    work = Workload(Of(lambda x, eye: LINALG[name](x + 40 * eye), (30, 30)), loss, [torch.eye(30)])
    real, fake = trace(work), trace(work, fake=True)
    assert real.peak_bytes == allocated_peak(work.model, loss, work.batch, None)
    assert fake.storage_peak_bytes == real.storage_peak_bytes


def test_masked_select_writes_its_gradient_into_zeros():
    work = Workload(Of(lambda x, m: x.masked_select(m), (30, 40)), loss, [mask(30, 40)])
    assert trace(work).peak_bytes == allocated_peak(work.model, loss, work.batch, None)


def test_the_steps_own_sums_of_products_stay_out_of_place():
    def function(x, w, b):
        product = x @ w
        return (product + b).sin() + (x @ w + b).cos() + product

    work = Workload(Of(function, (4, 30, 20), (20, 20), (20,)), loss, [])
    assert trace(work).peak_bytes == allocated_peak(work.model, loss, [], None)
    assert [op.name for op in trace(work).ops if op.phase == "forward"].count("aten.add_.Tensor") == 0


class Spread(torch.autograd.Function):
    """Written in Python, with a spread out of place on zeros that nobody holds."""

    @staticmethod
    def forward(ctx, x, index):
        ctx.save_for_backward(index)
        ctx.shape = x.shape
        return x.gather(1, index)

    @staticmethod
    def backward(ctx, gradient):
        (index,) = ctx.saved_tensors
        return gradient.new_zeros(ctx.shape).scatter_add(1, index, gradient), None


def test_the_steps_own_spreads_in_backward_stay_out_of_place():
    work = Workload(Of(Spread.apply, (30, 40)), loss, [PICKS])
    assert trace(work).peak_bytes == allocated_peak(work.model, loss, [PICKS], None)


@pytest.mark.parametrize("name", ["bias of a linear layer on a transposed input", "x[rows]", "max", "bce with logits"])
def test_a_prediction_for_a_gpu_writes_in_place_too(name):
    make, batch = STEPS[name]
    work = Workload(make(), loss, batch)
    here, there = trace(work, fake=True), trace(work, fake=True, device="h200")
    assert writes(here)
    assert writes(here) <= writes(there)


def writes(graph):
    return {op.name for op in graph.ops if op.name.split(".")[1].endswith("_")}
