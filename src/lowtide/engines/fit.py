"""``fit``: profile, plan, verify and apply in one call."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.engines.step import Step, apply
from lowtide.engines.tune import plan
from lowtide.engines.verify import verify as verify_plan
from lowtide.errors import PlanError
from lowtide.planning.search import Engine
from lowtide.workload import Workload


def fit(
    model: nn.Module,
    loss: Callable[[nn.Module, Any], Tensor],
    batch: Any,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    budget: float | str,
    autocast: torch.dtype | None = None,
    allow: str | Collection[str] = (),
    engine: Engine = "auto",
    verify: bool = True,
    tune: bool = True,
) -> Step:
    """Plan the step for a budget, check it against the plain one, and apply it: ``step(batch)`` trains.

    The budget, the engine and ``tune`` are as in ``plan``. A plan that does not give the promised results is refused
    with ``PlanError``; a measured peak above the budget is warned about. Until it returns, the model is as it was.

    >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(8)))
    >>> step = fit(model, lambda model, x: model(x).mean(), torch.ones(512, 64), budget="70%")
    >>> step.plan.fidelity.value, step.plan.peak_bytes < step.plan.baseline.peak_bytes
    ('bitwise', True)
    """
    work = Workload(model, loss, batch, optimizer, autocast)
    chosen = plan(work, budget, allow=allow, engine=engine, tune=tune)
    if verify:
        found = verify_plan(work, chosen)
        if not found.compared:
            warnings.warn(
                "The planned step was not compared with the plain one, which does not fit on this device. "
                "Verify it with a smaller batch: lowtide.verify(work, plan)",
                RuntimeWarning,
                stacklevel=2,
            )
        elif not found.results_agree:
            if not found.repeatable:
                raise PlanError(f"The planned step cannot be verified; verify=False applies it as it is:\n{found}")
            raise PlanError(f"The planned step does not give what it promised:\n{found}")
        if not found.within_budget:
            warnings.warn(f"The planned step is above its budget:\n{found}", RuntimeWarning, stacklevel=2)
    return apply(chosen, work)
