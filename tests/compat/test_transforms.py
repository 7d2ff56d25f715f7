"""Transforms of torch are seen while they run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from lowtide.compat import transforms


def state() -> tuple[bool, bool, bool]:
    return transforms.functorch_is_active(), transforms.is_jit_traced(), transforms.is_transformed()


def test_each_transform_is_seen_where_it_runs() -> None:
    seen: list[tuple[bool, bool, bool]] = []

    def double(x: Tensor) -> Tensor:
        seen.append(state())
        return x * 2

    double(torch.ones(2))
    torch.func.vmap(double)(torch.ones(2))
    with forward_ad.dual_level():
        double(torch.ones(2))
    torch.jit.trace(double, torch.ones(2), check_trace=False)
    assert seen == [
        (False, False, False),
        (True, False, True),
        (False, False, True),
        (False, True, True),
    ]


def test_export_is_seen_and_compilation_is_not_export() -> None:
    seen: list[bool] = []

    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 3 if transforms.is_exporting() else x * 2

    model = Model()
    assert not transforms.is_exporting()
    compiled: Any = torch.compile(model, backend="eager")
    exported = torch.export.export(model, (torch.ones(2),)).module()
    seen += [bool((each(torch.ones(2)) == 3).all()) for each in (model, compiled, exported)]
    assert seen == [False, False, True]


def test_batched_tensors_are_seen() -> None:
    seen: list[bool] = []

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Any:
            seen.append(transforms.is_batched(gradients[0]))
            return gradients[0] * 2

    x = torch.ones(2, requires_grad=True)
    y: Any = Double.apply(x)
    torch.autograd.grad(y, x, torch.ones(3, 2), is_grads_batched=True, retain_graph=True)
    torch.autograd.grad(y, x, torch.ones(2))
    torch.func.vmap(lambda t: seen.append(transforms.is_batched(t)) or t)(torch.ones(2))
    assert seen == [True, False, True]
