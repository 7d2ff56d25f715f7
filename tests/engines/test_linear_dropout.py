"""Recomputation draws the masks of the forward pass: a linear net with dropout shows it without a second run.

The loss of a net without biases and activations is linear in each weight. So it equals the inner product of each weight
with its gradient, if backward uses the very masks that forward drew.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowtide import Workload, apply, plan, profile
from lowtide.errors import BudgetError
from lowtide.planning.plan import Plan
from tests.soak import in_soak

WIDTH, DEPTH, ROWS = 16, 6, 256


def linear_net(device: str = "cpu") -> Workload:
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Dropout(0.3)) for _ in range(DEPTH))
    model = nn.Sequential(*blocks).double().to(device)
    batch = torch.randn(ROWS, WIDTH, dtype=torch.float64, device=device)
    return Workload(model, lambda model, x: model(x).sum(), batch)


def planned(work: Workload, budget: str, **options: Any) -> Plan:
    """The plan of a budget, or of the smallest that works."""
    plain = profile(work)
    try:
        return plan(work, budget, profile=plain, tune=False, **options)
    except BudgetError as error:
        return plan(work, error.smallest_bytes or 0, profile=plain, tune=False, **options)


def disagreement(work: Workload, loss: Tensor) -> float:
    weights = [parameter for parameter in work.model.parameters() if parameter.grad is not None]
    assert len(weights) == DEPTH
    products = [(weight * weight.grad).sum().item() for weight in weights if weight.grad is not None]
    return max(abs(product - loss.item()) for product in products) / abs(loss.item())


CASES = [
    (engine, compiled, budget)
    for engine, compiled in [("eager", False), ("graph", False), ("graph", True)]
    for budget in ["1%", *in_soak(["95%", "80%", "70%", "60%", "50%", "40%"])]
]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("engine", "compiled", "budget"), CASES)
def test_the_loss_is_the_inner_product_of_each_weight_with_its_gradient(
    engine: str, compiled: bool, budget: str, device: str
) -> None:
    work = linear_net(device)
    made = planned(work, budget, engine=engine, compile=compiled)
    assert not made.is_plain
    with apply(made, work) as step:
        for _ in range(2):  # other masks at the second step
            step.model.zero_grad()
            loss = step.loss(work.batch)
            loss.backward()
            assert disagreement(work, loss) < 1e-9


def test_other_masks_in_the_backward_pass_are_noticed() -> None:
    work = linear_net()
    block = work.model[0]

    class Redrawn(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return nn.functional.dropout(x, 0.3)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return nn.functional.dropout(grad, 0.3)

    block[1].forward = Redrawn.apply
    loss = work.compute_loss()
    loss.backward()
    assert disagreement(work, loss) > 1e-3
