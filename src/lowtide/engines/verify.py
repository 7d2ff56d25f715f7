"""``verify``: run the plain and the planned step from the same state, and compare them."""

from __future__ import annotations

import gc
import math
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lowtide.errors import PlanError
from lowtide.planning.engine import ENGINES
from lowtide.planning.lowering import LOWERINGS, compiles
from lowtide.planning.plan import Plan, check_plan
from lowtide.planning.rounding import (
    Rounding,
    coarsest_unit,
    distance,
    generators,
    in_32_bits,
    is_equal,
    norms,
    on_host,
    parts_equal,
)
from lowtide.profiling import profile
from lowtide.profiling.profile import json_ready
from lowtide.profiling.timing import RunMeter, measured_peak
from lowtide.sizes import format_size
from lowtide.techniques.registry import techniques
from lowtide.techniques.technique import Check, Fidelity
from lowtide.tracing.snapshot import steady, unchanged
from lowtide.tracing.step_state import other_bytes, parameters_of
from lowtide.workload import Workload

_TIMED_STEPS = 3
_STEPS_UNTIL_RECORDED = 2  # after which a plan launches CUDA graphs
_NOTHING = 1e-6  # the share of all gradients below which one is rounding alone
_MOST_NOISE = 0.1  # of a step that is repeatable at all, however coarse its numbers
_NOISE = 10  # two runs with noise can lie this many times further apart than two others


def verify(work: Workload, plan: Plan) -> Verification:
    """Run the plain and the planned step from the same state, compare them, and restore everything.

    If the first step stores tensors on the model, both start from the state after one. Losses, gradients, buffers, the
    parameters after the optimizer and the generators must agree as the plan's fidelity says. The peak and the seconds
    are measured, also if the plain step does not fit on the device. Nothing can be verified if two plain steps differ
    by more than roundoff.
    """
    check_plan(plan, work, call="lowtide.verify(work, plan)")
    if work.device.type == "meta":
        raise PlanError("A model on the meta device cannot run, so nothing can be verified")
    notes: list[str] = []
    plain: _StepResults | None = None
    judged = _Judged()
    others = other_bytes(work, gradients=False)
    reference = _Reference(work)
    with ExitStack() as stack:
        try:
            stack.enter_context(steady(work))
            before = generators(work)
            plain = _run(work, others)
            other = _reference(plan)
            if other is not None and not parts_equal(before, plain.parts["generators"]):
                notes.append("The plan draws dropout masks of its own. It is compared with itself, run op by op.")
                reference = _Reference(work, other)
                plain = replace(reference.run(others), seconds=plain.seconds)
        except torch.OutOfMemoryError:
            notes.append("The plain step does not fit on this device, so there is nothing to compare results with.")
        with ENGINES[plan.engine].apply(work, plan) as applied:
            if plan.program is not None and plan.program.is_recorded:
                with unchanged(work):
                    for _ in range(_STEPS_UNTIL_RECORDED):
                        _step(applied.work)
            planned = _run(applied.work, others, sees_gradients=not _strictest_promise(plan).leaves_gradients)
            # Compiled code allocates without torch's dispatcher, so a trace would not see its results.
            traced = None if compiles(plan) else profile(applied.work)
            if traced is None and planned.peak_bytes is None:
                with unchanged(work):
                    planned = replace(planned, peak_bytes=measured_peak(applied.work))
        if plain is not None:
            judged = _judge(work, reference, plan, plain, planned, others)
            notes += judged.notes
    return Verification(
        plan=plan,
        agreements=judged.agreements,
        peak_bytes=_first(planned.peak_bytes, traced and traced.peak_bytes, plan.peak_bytes),
        storage_peak_bytes=_first(traced and traced.storage_peak_bytes, planned.peak_bytes, plan.peak_bytes),
        seconds=planned.seconds,
        plain_seconds=math.nan if plain is None else plain.seconds,
        notes=tuple(notes),
        repeatable=judged.repeatable,
        only_rounding=judged.only_rounding and plan.fidelity is Fidelity.BITWISE,
    )


def _reference(plan: Plan) -> Plan | None:
    """The plan that draws the same random numbers; None where the plain step draws them."""
    other = plan.program and LOWERINGS[plan.program.lowering].reference
    return replace(plan, program=replace(plan.program, lowering=other)) if plan.program and other else None


@dataclass(frozen=True, slots=True)
class _Reference:
    """A step to compare a planned one with: by ``plan``, or else the plain step."""

    work: Workload
    plan: Plan | None = None

    def run(self, others: int) -> _StepResults:
        """Its results. A plan is applied for one run: until it is undone, it has the step's one shared capture."""
        if self.plan is None:
            return _run(self.work, others, is_timed=False)
        with ENGINES[self.plan.engine].apply(self.work, self.plan) as applied:
            return _run(applied.work, others, is_timed=False)


def _first(*values: int | None) -> int:
    return next(value for value in values if value is not None)


@dataclass(frozen=True, slots=True)
class Agreement:
    """Comparison of one part of the two steps' results."""

    what: str
    equal: bool  # bit for bit
    error: float  # the largest relative error of its tensors, in the 2-norm; see ``_agreement``
    holds: bool  # as the plan's fidelity promises


@dataclass(frozen=True)
class Verification:
    """The result of ``verify``. ``ok``: results compared and as promised, and the peak within the budget."""

    plan: Plan
    agreements: tuple[Agreement, ...]
    peak_bytes: int
    storage_peak_bytes: int
    seconds: float
    plain_seconds: float
    notes: tuple[str, ...] = ()
    repeatable: bool = True  # False: the plain step differs from itself by more than roundoff
    only_rounding: bool = False  # bits were promised, and results are off by no more than rounding

    @property
    def compared(self) -> bool:
        """Tell whether two steps were compared: the plain one may not fit on this device."""
        return bool(self.agreements)

    @property
    def results_agree(self) -> bool:
        """Losses, gradients, buffers, parameters and generators as promised; False where nothing was compared."""
        return self.compared and all(agreement.holds for agreement in self.agreements)

    @property
    def within_budget(self) -> bool:
        """The measured peak is at most the budget."""
        return self.peak_bytes <= self.plan.budget_bytes

    @property
    def ok(self) -> bool:
        """Tell whether everything is as promised."""
        return self.results_agree and self.within_budget

    def to_json(self) -> dict[str, Any]:
        """The verification as JSON-ready data; an unmeasured figure is null."""
        names = (field.name for field in fields(self) if field.name != "plan")
        data = {name: getattr(self, name) for name in ("ok", "compared", "results_agree", "within_budget", *names)}
        return json_ready({**data, "budget_bytes": self.plan.budget_bytes})

    def __str__(self) -> str:
        plan = self.plan
        lines = [f"{'verified' if self.ok else 'NOT as promised'} ({plan.fidelity})"]
        lines[0] += ": off by rounding alone" * self.only_rounding
        if not self.repeatable:
            lines = [f"CANNOT be verified ({plan.fidelity}): the plain step is not repeatable"]
        if not self.compared:
            lines = [f"NOT compared ({plan.fidelity}): only the planned step ran"]
        for a in self.agreements:
            how = "equal bit for bit" if a.equal else f"relative error {a.error:.1e}"
            lines.append(f"  {a.what:<12}{how}{'' if a.holds or not self.repeatable else ', which breaks the promise'}")
        rows = (
            ("peak", format_size(plan.peak_bytes), format_size(self.peak_bytes)),
            ("storage peak", f"{plan.storage_peak_bytes} B", f"{self.storage_peak_bytes} B"),
            ("seconds", f"{plan.seconds:.4g}", f"{self.seconds:.4g} (plain {self.plain_seconds:.4g})"),
        )
        lines += [f"  {name:<14}predicted {predicted}, measured {measured}" for name, predicted, measured in rows]
        above = self.peak_bytes - plan.budget_bytes
        kept = "" if self.within_budget else f": EXCEEDED by {format_size(above)}"
        lines.append(f"  {'budget':<14}{format_size(plan.budget_bytes)}{kept}")
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])


@dataclass(frozen=True, slots=True)
class _StepResults:
    """Results of a step, on the host."""

    parts: dict[str, dict[str, Tensor]]
    peak_bytes: int | None
    seconds: float


def _run(work: Workload, others: int, *, sees_gradients: bool = False, is_timed: bool = True) -> _StepResults:
    """Run a step for its results, then for time and, on a GPU, for the peak less ``others`` bytes. Restores all.

    ``sees_gradients`` copies each gradient on its way, for steps that leave none. Without ``is_timed``, it runs once.
    """
    model, seen = work.model, dict[str, Tensor]()
    with unchanged(work):
        with _watched(model, seen) if sees_gradients else nullcontext():
            loss = _step(work)
        parts = {
            "loss": {"loss": loss},
            "gradients": {n: p.grad for n, p in model.named_parameters() if p.grad is not None} | seen,
            "buffers": dict(model.named_buffers()),
            "parameters": dict(model.named_parameters()),
            "generators": generators(work),
        }
        parts = {what: {n: on_host(t) for n, t in part.items()} for what, part in parts.items()}
        del loss
        peak, seconds = _measure(work) if is_timed else (None, math.nan)
        if peak is not None:
            peak -= others
    return _StepResults(parts, peak, seconds)


@contextmanager
def _watched(model: nn.Module, seen: dict[str, Tensor]) -> Generator[None]:
    """Copy gradients to the host, before anything uses them."""

    def see(name: str, gradient: Tensor) -> None:
        seen[name] = on_host(gradient)

    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    handles = [parameter.register_hook(partial(see, name)) for name, parameter in named]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _step(work: Workload) -> Tensor:
    for parameter in work.model.parameters():
        parameter.grad = None
    loss = work.compute_loss()
    loss.backward()
    if work.optimizer is not None:
        work.optimizer.step()
    return loss.detach()


def _measure(work: Workload) -> tuple[int | None, float]:
    gc.collect()
    on_gpu = work.device.type == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()  # blocks that others left would be taken whole where a smaller one is asked for
    runs: list[RunMeter] = []
    for _ in range(_TIMED_STEPS):
        with RunMeter(work.device) as run:
            _step(work)
        runs.append(run)
    return runs[-1].peak_bytes if on_gpu else None, min(run.seconds for run in runs)


def _strictest_promise(plan: Plan) -> Check:
    """Promise of all choices together: the loosest class, the widest tolerance."""
    known = techniques()
    checks = [known[option.technique].check(option) for option in plan.options]
    return Check(
        plan.fidelity,
        rtol=max([0.0 if plan.program is None else plan.program.bound, *(check.rtol for check in checks)]),
        atol=max((check.atol for check in checks), default=0.0),
        leaves_gradients=all(check.leaves_gradients for check in checks),
    )


def _compare(plain: _StepResults, planned: _StepResults, check: Check) -> tuple[Agreement, ...]:
    return tuple(_agreement(what, part, planned.parts[what], check) for what, part in plain.parts.items())


class _Judged(NamedTuple):
    """Agreements of two steps, and what else was found about the plain one."""

    agreements: tuple[Agreement, ...] = ()
    repeatable: bool = True
    only_rounding: bool = False
    notes: Sequence[str] = ()


def _judge(
    work: Workload, reference: _Reference, plan: Plan, plain: _StepResults, planned: _StepResults, others: int
) -> _Judged:
    """Compare two steps. Where they disagree, measure noise, then rounding, then both in 32 bits."""
    agreements = _compare(plain, planned, _strictest_promise(plan))
    if all(agreement.holds for agreement in agreements):
        return _Judged(agreements)
    noise = _Noise(plain, reference.run(others), _roundoff_noise(work))
    agreements = tuple(noise.let_pass(agreement, planned) for agreement in agreements)
    judged = _Judged(agreements, noise.is_roundoff, notes=noise.notes)
    agrees = all(agreement.holds for agreement in agreements)
    if agrees or not noise.is_roundoff or plan.fidelity > Fidelity.ROUNDOFF:
        return judged
    rounding = Rounding(work)
    rounded = _let_rounding_pass(agreements, plain, planned, rounding)
    if all(agreement.holds for agreement in rounded) or plan.fidelity is not Fidelity.ROUNDOFF:
        only_rounding = all(agreement.holds for agreement in rounded)
        shown = rounded if plan.fidelity is Fidelity.ROUNDOFF else agreements
        return judged._replace(agreements=shown, only_rounding=only_rounding)
    draws = not parts_equal(generators(work), plain.parts["generators"])  # and would draw others in 32 bits
    if draws or reference.plan is not None:
        return judged._replace(agreements=rounded)
    near, notes = _let_as_near_pass(work, rounding, rounded, plain, planned, others)
    return judged._replace(agreements=near, notes=[*judged.notes, *notes])


def _let_rounding_pass(
    agreements: tuple[Agreement, ...], plain: _StepResults, planned: _StepResults, rounding: Rounding
) -> tuple[Agreement, ...]:
    """Accept differences that rounding explains. Parameters are shown, not judged."""
    return tuple(
        replace(a, holds=a.holds or rounding.explains(a.what, plain.parts[a.what], planned.parts[a.what]))
        if a.what != "parameters"  # an optimizer can make a whole step of a gradient's last digit
        else replace(a, holds=True)
        for a in agreements
    )


def _let_as_near_pass(
    work: Workload,
    rounding: Rounding,
    agreements: tuple[Agreement, ...],
    plain: _StepResults,
    planned: _StepResults,
    others: int,
) -> tuple[tuple[Agreement, ...], list[str]]:
    """Accept results that are as near to those of the step in 32 bits as the plain step's are, and say so."""
    if any(parameter.dtype in (torch.bfloat16, torch.float16) for parameter in parameters_of(work)):
        return agreements, []
    try:
        with in_32_bits():
            exact = _run(replace(work, autocast=None), others, is_timed=False).parts
    except RuntimeError:  # of a step that needs autocast, or more memory
        return agreements, []
    near = tuple(
        replace(
            a,
            holds=a.holds or rounding.is_as_near(a.what, exact[a.what], plain.parts[a.what], planned.parts[a.what]),
        )
        for a in agreements
    )
    if not all(a.holds for a in near):
        return agreements, []
    plain_off, planned_off = (distance(exact["gradients"], each.parts["gradients"]) for each in (plain, planned))
    return near, [
        f"Compared with the plain step in 32 bits and without cuDNN: gradients of the plain step are {plain_off:.1%} "
        f"off, those of the planned step {planned_off:.1%}."
    ]


def _agreement(what: str, plain: dict[str, Tensor], planned: dict[str, Tensor], check: Check) -> Agreement:
    """Compare one part. An approximate tensor's error is relative to its norm, or to its share of the whole part's."""
    same_names = plain.keys() == planned.keys()
    equal = same_names and all(is_equal(tensor, planned[name]) for name, tensor in plain.items())
    if equal:
        return Agreement(what, True, 0.0, True)
    if not same_names or what == "generators":
        return Agreement(what, False, math.inf, check.fidelity > Fidelity.ROUNDOFF)
    error, within = 0.0, True
    sizes = [norms(tensor, planned[name]) for name, tensor in plain.items()]
    whole = math.hypot(*(size for size, _ in sizes))
    nothing = _NOTHING * whole if check.fidelity is Fidelity.ROUNDOFF else 0.0
    elements = sum(tensor.numel() for tensor in plain.values())
    for (size, off), tensor in zip(sizes, plain.values(), strict=True):
        if max(size, off) <= nothing:  # such as a bias's before a norm, which is 0 but for rounding
            continue
        if check.fidelity is Fidelity.APPROXIMATE:  # where gradients nearly cancel, errors need not
            size = max(size, whole * math.sqrt(tensor.numel() / elements))
        error = max(error, off / size if size else off)
        within &= off <= check.atol + check.rtol * size
    promised_nothing = check.fidelity in (Fidelity.UNBIASED, Fidelity.CHANGED)
    # An optimizer can make a whole step of a gradient's last digit, as Adam does near zero.
    promised_nothing |= what == "parameters" and check.fidelity is Fidelity.ROUNDOFF
    return Agreement(what, False, error, promised_nothing or within)


# -- noise ---------------------------------------------------------------------------------------------


class _Noise:
    """Differences between two plain steps, and the tolerance that follows.

    Kernels that add in no fixed order differ from themselves in the last digits: an error of that size breaks no
    promise. A step that differs by more is another one each time, and no other can be held against it.
    """

    def __init__(self, plain: _StepResults, again: _StepResults, limit: float) -> None:
        self.plain = plain
        self.limit = limit
        self.noise = {agreement.what: agreement for agreement in _compare(plain, again, Check.EXACT)}
        self.distance = max(_distance(what, part, again.parts[what]) for what, part in plain.parts.items())

    @property
    def is_roundoff(self) -> bool:
        return self.distance <= self.limit

    @property
    def notes(self) -> list[str]:
        if not self.is_roundoff:
            return [
                f"The plain step differs from itself by {self.distance:.1e} when run twice: more than roundoff. "
                "Are there random numbers of other than the global generators, or state outside of the model?"
            ]
        if all(agreement.equal for agreement in self.noise.values()):
            return []
        return ["The plain step differs from itself when run twice: that much error is let pass."]

    def let_pass(self, agreement: Agreement, planned: _StepResults) -> Agreement:
        what = agreement.what
        is_noise = self.is_roundoff and agreement.error <= _NOISE * self.noise[what].error
        return replace(
            agreement,
            holds=agreement.holds
            or (is_noise and _distance(what, self.plain.parts[what], planned.parts[what]) <= self.limit),
        )


def _roundoff_noise(work: Workload) -> float:
    """Tolerance for a whole part of the results under roundoff: half of the digits."""
    return min(math.sqrt(coarsest_unit(work)), _MOST_NOISE)


def _distance(what: str, plain: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Relative error of all tensors together; infinite for unequal generators."""
    if what == "generators":
        return 0.0 if parts_equal(plain, other) else math.inf
    return distance(plain, other)
