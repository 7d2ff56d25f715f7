"""A training step as benchmarks run it: plain, under a technique, and all that it leaves."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from lowtide import Workload
from lowtide.tracing.unchanged import unchanged

Way = Callable[[], AbstractContextManager[object]]


def plain_step(work: Workload) -> Tensor:
    """The loss, backward, the optimizer; gradients of the step before are let go first."""
    assert work.optimizer is not None
    work.optimizer.zero_grad(set_to_none=True)
    loss = work.compute_loss()
    loss.backward()
    work.optimizer.step()
    return loss.detach()


def under(way: Way, run: Callable[[], object]) -> Callable[[], object]:
    """The same call with a technique put on before and taken off after."""

    def wrapped() -> object:
        with way():
            return run()

    return wrapped


def outcome(work: Workload) -> dict[str, Tensor]:
    """Everything that a step leaves, copied; the step itself is taken back."""
    with unchanged(work):
        torch.manual_seed(0)
        loss = plain_step(work)
        model = work.model
        found = {"loss": loss, "generator": torch.get_rng_state()}
        found |= {f"{name}.grad": p.grad for name, p in model.named_parameters() if p.grad is not None}
        found |= dict(model.named_buffers())
        return {name: value.detach().clone() for name, value in found.items()}
