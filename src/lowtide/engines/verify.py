"""``verify``: the plain step and the planned one from the same state, side by side."""

from __future__ import annotations

import gc
import math
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lowtide.engines.step import planned as planned_step
from lowtide.errors import PlanError
from lowtide.planning.plan import Plan, check_plan
from lowtide.profiling import profile
from lowtide.profiling.profile import finite
from lowtide.sizes import format_size
from lowtide.techniques.registry import techniques
from lowtide.techniques.technique import Check, Fidelity
from lowtide.tracing.unchanged import unchanged
from lowtide.workload import Workload

_TIMED_STEPS = 3
_ROUNDOFF = 5e-2  # of a captured graph's batch norm, through all layers behind it, in TensorFloat-32
_NOISE = 10  # two runs with noise can lie this many times further apart than two others


def verify(work: Workload, plan: Plan) -> Verification:
    """Run the plain and the planned step from the same state and compare them; everything is put back after.

    Losses, gradients, buffers, the parameters after the optimizer and the generators must agree as the plan's
    fidelity says; the peak and the seconds are measured. Where the plain step does not fit, only those are.
    """
    check_plan(plan, work, call="lowtide.verify(work, plan)")
    if work.device.type == "meta":
        raise PlanError("A model on the meta device cannot run, so nothing can be verified")
    notes: list[str] = []
    plain: _Outcome | None = None
    try:
        plain = _run(work)
    except torch.OutOfMemoryError:
        notes.append("The plain step does not fit on this device, so there is nothing to compare results with.")
    with planned_step(work, plan) as applied:
        planned = _run(applied.work)
        traced = profile(applied.work)
    agreements: tuple[Agreement, ...] = ()
    if plain is not None:
        agreements = _compare(plain, planned, _strictest_promise(plan))
        if not all(agreement.holds for agreement in agreements):
            noise = _compare(plain, _run(work), Check.EXACT)
            if not all(agreement.equal for agreement in noise):
                notes.append("The plain step differs from itself when run twice: that much error is let pass.")
                agreements = tuple(map(_within_noise, agreements, noise))
    return Verification(
        plan=plan,
        agreements=agreements,
        peak_bytes=traced.peak_bytes if planned.peak_bytes is None else planned.peak_bytes,
        storage_peak_bytes=traced.storage_peak_bytes,
        seconds=planned.seconds,
        plain_seconds=math.nan if plain is None else plain.seconds,
        notes=tuple(notes),
    )


@dataclass(frozen=True, slots=True)
class Agreement:
    """How one part of the two steps' results compares."""

    what: str
    equal: bool  # bit for bit
    error: float  # the largest relative error of its tensors, in the 2-norm
    holds: bool  # as the plan's fidelity promises


@dataclass(frozen=True)
class Verification:
    """What ``verify`` found. ``ok``: results as promised, and the peak within the budget."""

    plan: Plan
    agreements: tuple[Agreement, ...]
    peak_bytes: int
    storage_peak_bytes: int
    seconds: float
    plain_seconds: float
    notes: tuple[str, ...] = ()

    @property
    def results_agree(self) -> bool:
        """Losses, gradients, buffers, parameters and generators as promised."""
        return all(agreement.holds for agreement in self.agreements)

    @property
    def within_budget(self) -> bool:
        """The measured peak is at most the budget."""
        return self.peak_bytes <= self.plan.budget_bytes

    @property
    def ok(self) -> bool:
        """Everything as promised."""
        return self.results_agree and self.within_budget

    def to_json(self) -> dict[str, Any]:
        """The finding as JSON-ready data; a figure that was not measured is null."""
        return {
            "ok": self.ok,
            "results_agree": self.results_agree,
            "within_budget": self.within_budget,
            "budget_bytes": self.plan.budget_bytes,
            "peak_bytes": self.peak_bytes,
            "storage_peak_bytes": self.storage_peak_bytes,
            "seconds": finite(self.seconds),
            "plain_seconds": finite(self.plain_seconds),
            "agreements": [{**asdict(a), "error": finite(a.error)} for a in self.agreements],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        plan = self.plan
        lines = [f"{'verified' if self.ok else 'NOT as promised'} ({plan.fidelity})"]
        for a in self.agreements:
            how = "equal bit for bit" if a.equal else f"relative error {a.error:.1e}"
            lines.append(f"  {a.what:<12}{how}{'' if a.holds else ', which breaks the promise'}")
        rows = (
            ("peak", format_size(plan.peak_bytes), format_size(self.peak_bytes)),
            ("storage peak", f"{plan.storage_peak_bytes} B", f"{self.storage_peak_bytes} B"),
            ("seconds", f"{plan.seconds:.4g}", f"{self.seconds:.4g} (plain {self.plain_seconds:.4g})"),
        )
        lines += [f"  {name:<14}predicted {predicted}, measured {measured}" for name, predicted, measured in rows]
        lines.append(f"  {'budget':<14}{format_size(plan.budget_bytes)}{'' if self.within_budget else ': EXCEEDED'}")
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What a step left, on the host."""

    parts: dict[str, dict[str, Tensor]]
    peak_bytes: int | None
    seconds: float


def _run(work: Workload) -> _Outcome:
    """A step and what it left; a few more for the time and, on a GPU, the peak. Everything is put back."""
    with unchanged(work):
        loss = _step(work)
        model = work.model
        generators = {"cpu": torch.get_rng_state()}
        if work.device.type == "cuda":
            generators["cuda"] = torch.cuda.get_rng_state(work.device)
        parts = {
            "loss": {"loss": loss},
            "gradients": {n: p.grad for n, p in model.named_parameters() if p.grad is not None},
            "buffers": dict(model.named_buffers()),
            "parameters": dict(model.named_parameters()),
            "generators": generators,
        }
        parts = {what: {n: _on_host(t) for n, t in part.items()} for what, part in parts.items()}
        del loss
        peak, seconds = _measure(work)
    return _Outcome(parts, peak, seconds)


def _step(work: Workload) -> Tensor:
    for parameter in work.model.parameters():
        parameter.grad = None
    loss = work.compute_loss()
    loss.backward()
    if work.optimizer is not None:
        work.optimizer.step()
    return loss.detach()


def _measure(work: Workload) -> tuple[int | None, float]:
    device = work.device
    on_gpu = device.type == "cuda"
    times: list[float] = []
    gc.collect()
    for _ in range(_TIMED_STEPS):
        if on_gpu:
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
        start = time.perf_counter()
        _step(work)
        if on_gpu:
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return torch.cuda.max_memory_allocated(device) if on_gpu else None, min(times)


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _strictest_promise(plan: Plan) -> Check:
    """What all choices together still promise: the loosest class, the widest tolerance."""
    known = techniques()
    checks = [known[option.technique].check(option) for option in plan.options]
    if plan.program is not None and plan.program.fidelity is Fidelity.ROUNDOFF:
        checks.append(Check(Fidelity.ROUNDOFF, rtol=_ROUNDOFF))
    return Check(
        plan.fidelity,
        rtol=max((check.rtol for check in checks), default=0.0),
        atol=max((check.atol for check in checks), default=0.0),
        leaves_gradients=all(check.leaves_gradients for check in checks),
    )


def _compare(plain: _Outcome, planned: _Outcome, check: Check) -> tuple[Agreement, ...]:
    parts = [what for what in plain.parts if what != "gradients" or check.leaves_gradients]
    return tuple(_agreement(what, plain.parts[what], planned.parts[what], check) for what in parts)


def _agreement(what: str, plain: dict[str, Tensor], planned: dict[str, Tensor], check: Check) -> Agreement:
    same_names = plain.keys() == planned.keys()
    equal = same_names and all(torch.equal(tensor, planned[name]) for name, tensor in plain.items())
    if equal:
        return Agreement(what, True, 0.0, True)
    if not same_names or what == "generators":
        return Agreement(what, False, math.inf, check.fidelity > Fidelity.ROUNDOFF)
    error, within = 0.0, True
    for name, tensor in plain.items():
        size, off = _norms(tensor, planned[name])
        error = max(error, off / size if size else off)
        within &= off <= check.atol + check.rtol * size
    promised_nothing = check.fidelity in (Fidelity.UNBIASED, Fidelity.CHANGED)
    # An optimizer can make a whole step of a gradient's last digit, as Adam does near zero.
    promised_nothing |= what == "parameters" and check.fidelity is Fidelity.ROUNDOFF
    return Agreement(what, False, error, promised_nothing or within)


def _within_noise(found: Agreement, noise: Agreement) -> Agreement:
    """Kernels that are not deterministic differ from themselves: an error of that size breaks no promise."""
    return replace(found, holds=found.holds or found.error <= _NOISE * noise.error)


def _norms(plain: Tensor, planned: Tensor) -> tuple[float, float]:
    if plain.shape != planned.shape:
        return math.nan, math.inf
    exact, other = plain.double(), planned.double()
    return float(exact.norm()), float((other - exact).norm())
