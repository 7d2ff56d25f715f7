"""``fit``: profile, plan, verify and apply in one call."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lowtide.engines.step import Step, apply
from lowtide.engines.tune import plan
from lowtide.engines.verify import Verification
from lowtide.engines.verify import verify as verify_plan
from lowtide.errors import BudgetError, PlanError
from lowtide.planning.candidate import Permission
from lowtide.planning.engine import AUTO, ENGINES
from lowtide.planning.plan import Plan
from lowtide.techniques.technique import Fidelity
from lowtide.tracing.capture.loss import sharing_captures
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
    forbid: str | Collection[str] = (),
    engine: str = AUTO,
    compile: bool | Literal["auto"] = "auto",
    verify: bool = True,
    tune: bool = True,
) -> Step:
    """Plan the step for a budget, check it against the plain one, and apply it: ``step(batch)`` trains.

    The budget, ``allow``, ``forbid``, the engine, ``compile`` and ``tune`` are as in ``plan``. The model changes only
    when ``fit`` returns. The plan's notes say what verification found.

    | verification finds | ``fit`` |
    |---|---|
    | bits were promised, and results are off by rounding | warns, and the plan becomes roundoff |
    | results break the promise | warns and takes another engine's plan, or raises ``PlanError`` |
    | a peak above the budget | warns |

    >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(8)))
    >>> step = fit(model, lambda model, x: model(x).mean(), torch.ones(512, 64), budget="70%")
    >>> step.plan.fidelity.value, step.plan.peak_bytes < step.plan.baseline.peak_bytes
    ('bitwise', True)
    """
    work = Workload(model, loss, batch, optimizer, autocast)
    with sharing_captures(work):
        chosen = plan(work, budget, allow=allow, forbid=forbid, engine=engine, compile=compile, tune=tune)
        if verify:
            plan_on = partial(plan, work, budget, allow=allow, forbid=forbid)
            chosen = _verified(work, chosen, plan_on, engine, Permission.of(allow).loosest)
        return apply(chosen, work)


def _verified(work: Workload, chosen: Plan, plan_on: Callable[..., Plan], engine: str, loosest: Fidelity) -> Plan:
    """Run the plan beside the plain step; return it, corrected, or another one, or raise."""
    checked = verify_plan(work, chosen)
    wrong = checked.compared and not checked.results_agree
    if wrong and ENGINES[chosen.engine].captures and engine == AUTO and not checked.only_rounding:
        chosen, checked = _fall_back(work, chosen, checked, plan_on)
        wrong = checked.compared and not checked.results_agree
    if not checked.compared:
        warnings.warn(
            "The planned step was not compared with the plain one, which does not fit on this device. "
            "Verify it with a smaller batch: lowtide.verify(work, plan)",
            RuntimeWarning,
            stacklevel=3,
        )
    if wrong:
        if not checked.repeatable:
            raise PlanError(f"The planned step cannot be verified; verify=False applies it as it is:\n{checked}")
        if not checked.only_rounding or loosest < Fidelity.ROUNDOFF:
            raise PlanError(f"The planned step does not give what it promised:\n{checked}")
        error = max(agreement.error for agreement in checked.agreements)
        note = f"Bits were promised, and results are off by rounding, {error:.1e}: the plan is roundoff."
        warnings.warn(f"{note} allow='bitwise' refuses such plans.", RuntimeWarning, stacklevel=3)
        chosen = chosen.with_rounding(note)
    if not checked.within_budget:
        warnings.warn(f"The planned step is above its budget:\n{checked}", RuntimeWarning, stacklevel=3)
    return replace(chosen, notes=(*chosen.notes, *checked.notes))


def _fall_back(
    work: Workload, failed: Plan, checked: Verification, plan_on: Callable[..., Plan]
) -> tuple[Plan, Verification]:
    """Plan for an engine that captures nothing; return the failed plan if none fits."""
    for engine in (engine for engine in ENGINES.values() if not engine.captures):
        with suppress(BudgetError):
            chosen = plan_on(engine=engine.name)
            warnings.warn(
                f"The {failed.engine} engine's step does not give what it promised; "
                f"the {engine.name} engine runs instead:\n{checked}",
                RuntimeWarning,
                stacklevel=4,
            )
            return chosen, verify_plan(work, chosen)
    return failed, checked
