"""Batch norm + activation as one function that keeps one buffer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowtide.compat.autograd import in_backward
from lowtide.kernels.activations import Activation
from lowtide.kernels.reference.batchnorm import Running
from lowtide.nn.batchnorm_node import apply_node
from lowtide.nn.batchnorm_plain import plain, runs_plain
from lowtide.nn.hidden_writes import CheckedCalls
from lowtide.nn.statistics import Statistics, copied, count_batch
from lowtide.nn.strategies import KEEPS, InverseGuard, Spec, Strategy, resolve


def batch_norm_act(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    num_batches_tracked: Tensor | None = None,
    *,
    activation: str | Activation = "relu",
    strategy: Strategy = "auto",
    training: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    residual: Tensor | None = None,
    rebuild: bool = True,
    group: Any = None,
    statistics: Statistics | None = None,
    layer: Any = None,
) -> Tensor:
    """Return φ(batch_norm(x) + residual), keeping for backward what ``strategy`` says.

    | strategy        | keeps   | recomputes in backward                 |
    |-----------------|---------|----------------------------------------|
    | standard        | x and z |                                        |
    | checkpoint      | x       | batch norm and φ                       |
    | checkpoint_xhat | x̂       | the affine map and φ                   |
    | inplace         | z       | φ⁻¹ and the inverse affine map         |
    | inplace2        | z       | φ⁻¹                                    |
    | auto            | the cheapest exact one for this activation, dtype and device |

    - Where z is not kept, ops that save it save a recipe instead. This holds inside the forward of a module and under
      ``lowtide.nn.keep_one_buffer()``. ``rebuild=False`` lets them save z.
    - An in-place strategy becomes "checkpoint" where some channel's |β/γ| is so large that z does not determine x.
    - Running statistics move once, in place, and batches are counted. A checkpoint's recomputation leaves them alone.
    - With a process ``group``, statistics are those of all its members' batches. With ``statistics``, those are used.
    - ``layer`` is the layer that calls. Writes through ``.data`` to z are noticed for layers alone. Without a layer,
      the in-place strategies wait for a GPU at each call.
    """
    act = Activation.of(activation)
    chosen = resolve(strategy, act, x, joined=residual is not None, where=layer or "")
    learned = () if act.module is None else tuple(act.module.parameters())
    others = (weight, bias, residual, *learned)
    needs_grad = torch.is_grad_enabled() and (x.requires_grad or any(t is not None and t.requires_grad for t in others))
    rebuild = rebuild and needs_grad and chosen != "standard"
    calls = CheckedCalls(checks=0) if layer is None else layer.calls
    spec = Spec(act, chosen, training, eps, rebuild, group, statistics, calls, layer or "")
    running = Running(running_mean, running_var, momentum, num_batches_tracked if training else None)
    if training and in_backward():
        running = copied(running)
    if runs_plain(x, residual, spec, needs_grad):
        count_batch(running)
        return plain(x, weight, bias, running, residual, spec)
    guard = InverseGuard() if layer is None else layer.guard
    if KEEPS[spec.strategy] == "z" and not guard.is_safe(x, weight, bias, act):
        spec = spec._replace(strategy="checkpoint")
    return apply_node(x, weight, bias, residual, running, spec, *learned)
