"""``plan`` as users call it: plans with close predicted seconds are timed before one is chosen."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from typing import Literal, Self, TypeVar

from lowtide.compat.dynamo import cause_of
from lowtide.engines.recorded import NOT_LAUNCHED
from lowtide.errors import BudgetError, PlanError
from lowtide.planning.baseline import OUT_OF_MEMORY, baseline_profile
from lowtide.planning.budget import plans
from lowtide.planning.candidate import Permission
from lowtide.planning.combinations import leaves_gradients
from lowtide.planning.engine import AUTO, ENGINES, Candidates, engines_named
from lowtide.planning.lowering import compiles
from lowtide.planning.plan import Choice, Plan, ProgramChoice
from lowtide.profiling import Profile
from lowtide.profiling.timing import best_seconds, has_ranks, measured_peak
from lowtide.sizes import format_seconds, format_size
from lowtide.tracing.capture.loss import sharing_captures
from lowtide.tracing.snapshot import unchanged
from lowtide.tracing.step_state import UnusedStorages, other_bytes
from lowtide.workload import Workload, check_workload

_RIVALS = 3  # plans that are timed
_ROUNDS = 2  # in turns
_SEARCHES = 3  # at most, each with the bytes that plans of the one before measured; the last compiles nothing
_ALONE = "It is as fast as the plain step, so plans that do not compile were not looked for (compile=False does)."
_Part = TypeVar("_Part", Choice, ProgramChoice)
_NOISE = 1.03  # a stricter plan is taken if it is at most this much slower


def plan(
    work: Workload,
    budget: float | str,
    *,
    allow: str | Collection[str] | None = (),
    forbid: str | Collection[str] | None = (),
    profile: Profile | None = None,
    fake: bool = False,
    device: str | None = None,
    engine: str = AUTO,
    compile: bool | Literal["auto"] = "auto",
    tune: bool = True,
) -> Plan:
    """Find the fastest step whose peak of allocated bytes, everything included, is at most ``budget``.

    ``budget`` is "6GiB", "800MB", a number of bytes, "60%" of the plain step's peak, or "device". A plan uses bitwise
    and roundoff techniques. ``allow`` permits more: a fidelity class with all stricter ones, or a technique's name.
    "bitwise" alone permits nothing else. ``forbid`` names techniques that it does not use. A ``profile`` of the plain
    step avoids tracing it again. The plain step is predicted with ``fake``, for a ``device`` that is not here, and
    where it does not fit. The model does not change.

    A plan may step parameters in backward, for loops that call ``step(batch)``. Gradients are then gone, and
    ``step.loss`` raises. Loops that read them plan with ``forbid="optimizer_in_backward"``.

    ``engine`` names what may run the step. "eager" runs the model's own code, with techniques in its modules. "graph"
    captures the loss, forward and backward, and plans op by op. "auto" takes the faster plan of both.
    ``compile=True`` has Inductor compile regions, with roundoff and dropout masks of their own. "auto" does so on a
    GPU, where it measures faster.

    On a GPU, a compiled plan that measures as fast as the plain step is taken at once, unless ``allow`` opens more than
    roundoff. Otherwise, up to three plans with close predictions run a few steps. The fastest is taken, with its
    measured seconds. ``tune=False`` skips that, and so does a process group, whose ranks need one plan. Then, for one
    profile, a larger budget never gives a plan that is predicted slower. If nothing fits, ``BudgetError`` names a
    budget that works, who holds the bytes, and what to allow for less.
    """
    check_workload(work, call="lowtide.plan(work, budget)")
    is_here = not fake and device in (None, work.device.type) and work.device.type != "meta"
    most = _RIVALS if tune and is_here and not has_ranks() else 1
    permitted = Permission.of(allow, forbid)
    captures = any(each.captures for each in engines_named(engine))
    if compile is True and not (is_here and captures):
        reason = "is only predicted" if captures else f"runs on the {engine} engine"
        raise PlanError(f"The step {reason}, so nothing can be compiled", hint="Leave compile=True (--compile) out.")
    is_measured = work.device.type == "cuda" and most > 1
    lowerings = (None if is_measured else False) if compile == "auto" else compile
    with sharing_captures(work):
        baseline = profile or baseline_profile(work, fake=fake, device=device)
        search = partial(plans, work, budget, baseline, permitted=permitted)
        if most == 1:
            (only,) = search(engine=engine, compile=lowerings if is_here else False)
            return only
        with _Trouble() as trouble:
            if lowerings is None and permitted.is_default and OUT_OF_MEMORY not in baseline.graph.notes:
                compiled = _compiled_alone(work, baseline, search, engine, trouble)
                if compiled is not None:
                    return _recorded(work, baseline, search, compiled)
            best = partial(search, engine=engine, most=most)
            chosen = _measured(work, baseline, best, [*[lowerings] * _SEARCHES, False], trouble)
            return _recorded(work, baseline, search, chosen)


@dataclass
class _Trouble:
    """Failures and excess bytes of compiled plans, collected in one call of ``plan`` and forgotten at its end."""

    excess: int = 0  # bytes beyond their predictions
    failed: list[str] = field(default_factory=list[str])
    learned: list[Candidates] = field(default_factory=list[Candidates])  # which know of the excess

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for each in self.learned:
            each.forget()


def _compiled_alone(
    work: Workload, baseline: Profile, search: Callable[..., list[Plan]], engine: str, trouble: _Trouble
) -> Plan | None:
    """The fastest compiled plan, if it is measured to be as fast as the plain step; otherwise None.

    Other plans run the same ops, or the plain step's, one after another. Searching for them takes most of planning. The
    plan says that it was not done.
    """
    for each in engines_named(engine):
        if each.captures:
            with suppress(PlanError, BudgetError):  # not captured, or nothing fits
                alone = partial(search, engine=each.name)
                chosen = _measured(work, baseline, alone, [True] * _SEARCHES, trouble)
                if compiles(chosen) and chosen.seconds <= chosen.baseline.seconds:
                    return replace(chosen, notes=(*chosen.notes, _ALONE))
    return None


def _measured(
    work: Workload,
    baseline: Profile,
    search: Callable[..., list[Plan]],
    lowerings: Sequence[bool | None],
    trouble: _Trouble,
) -> Plan:
    """Time the plans of a search and take the fastest, measured to keep the budget.

    Where it does not, the search repeats with the bytes that it took beyond its prediction, for each of ``lowerings``:
    usually a few times, and at last without compiled plans. Raises ``BudgetError`` if no plan keeps the budget then.
    """
    beside, reserved, peak, failed = baseline.graph.beside_bytes, 0, 0, False
    for number, compile in enumerate(lowerings):
        if failed and compile is not False:
            continue
        try:
            rivals = search(compile=compile, reserved=reserved)
        except BudgetError:
            if not number or compile is False:
                raise
            continue  # with the measured bytes, no compiled plan fits
        if len(rivals) == 1 and not _is_measured(work, rivals[0]):
            return _with_notes(rivals[0], trouble)
        try:
            chosen, peak = _fastest(work, rivals, beside)
        except PlanError as error:  # every step failed
            if compile is False:
                raise
            failed = True
            trouble.failed.append(str(error))
            continue
        if peak <= chosen.budget_bytes:
            return _with_notes(chosen, trouble)
        more = peak - chosen.peak_bytes
        trouble.excess += more if compiles(chosen) else 0
        candidates = ENGINES[chosen.engine].candidates(work, baseline) if compiles(chosen) else None
        if candidates is not None and chosen.program is not None:
            candidates.learn(chosen.program, more)
            trouble.learned.append(candidates)
        else:
            reserved = max(reserved, more)
    raise BudgetError(
        f"Plans for this budget measured up to {format_size(peak)}, {peak} bytes",
        hint="Name a larger budget, or take a plan as it is predicted: tune=False.",
        smallest_bytes=peak,
    )


def _recorded(work: Workload, baseline: Profile, search: Callable[..., list[Plan]], chosen: Plan) -> Plan:
    """The chosen plan, or one recorded as CUDA graphs, where that is measured to be faster and to keep the budget.

    A recording's pool holds more than the program does. Where that is above the budget, a plan that leaves those bytes
    is recorded instead.
    """
    plan, excess, as_it_is = chosen, 0, inf
    for _ in range(_SEARCHES):
        if excess:
            try:
                (plan,) = search(engine=chosen.engine, compile=compiles(chosen), reserved=excess)
            except BudgetError:
                break
        if work.device.type != "cuda" or plan.program is None or not all(map(leaves_gradients, plan.options)):
            break
        if plan is chosen:
            (as_it_is,), _, _ = _times(work, [chosen])
        recorded = replace(plan, program=replace(plan.program, is_recorded=True))
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=NOT_LAUNCHED)  # as a step that fails
            (taken,), peaks, _ = _times(work, [recorded])
        if taken * _NOISE > as_it_is or taken == inf:
            break
        peak = peaks[0] + baseline.graph.beside_bytes
        if peak <= chosen.budget_bytes:
            times = f"{format_seconds(taken)}, and {format_seconds(as_it_is)} without CUDA graphs"
            note = f"Timed before choosing, loss and gradients of a step: {times}."
            longer = chosen.seconds + taken - as_it_is - chosen.baseline.seconds
            return _with_seconds(replace(recorded, peak_bytes=peak, notes=(*chosen.notes, note)), longer)
        excess = max(excess, peak - plan.peak_bytes)
    return chosen


def _with_notes(plan: Plan, trouble: _Trouble) -> Plan:
    """Note why compiled plans were left out, if they were."""
    excess = 0 if compiles(plan) else trouble.excess
    note = f"Compiled plans measured {format_size(excess)} more than predicted, and none is taken."
    return replace(plan, notes=(*plan.notes, *dict.fromkeys(trouble.failed), *([note] if excess else [])))


def _is_measured(work: Workload, plan: Plan) -> bool:
    """Whether a plan without rivals runs before it is chosen.

    Compilers choose what to allocate, and a GPU's allocator gives blocks that are larger than what was asked for.
    """
    return bool(plan.choices) or compiles(plan) or (plan.program is not None and work.device.type == "cuda")


def _fastest(work: Workload, rivals: list[Plan], beside: int = 0) -> tuple[Plan, int]:
    """Time plans and take the fastest, or a stricter one that is as fast within noise; and its bytes as measured.

    The bytes are 0 where they need no measurement. ``beside`` are those of tensors that the loss holds, which are not
    told from other tensors of the process. Raises ``PlanError`` if every step failed.
    """
    (plain, *timed), peaks, notes = _times(work, [None, *rivals])
    fastest = min(timed)
    if fastest == inf:
        raise PlanError(f"No plan that fits runs. {' '.join(notes)}".strip())
    as_fast = [index for index, seconds in enumerate(timed) if seconds <= fastest * _NOISE]
    chosen = min(as_fast, key=lambda index: (rivals[index].fidelity.rank, timed[index]))
    times = [
        f"{_name(rival)} {format_seconds(taken)}" for rival, taken in zip(rivals, timed, strict=True) if taken < inf
    ]
    what = "whole steps" if any(map(_steps_in_backward, rivals)) else "loss and gradients of a step"
    notes.append(f"Timed before choosing, {what}: {', '.join(times)}.")
    best = replace(rivals[chosen], notes=(*rivals[chosen].notes, *notes))
    if len(times) > 1:
        why = f"Measured to be the fastest of {len(times)} plans that fit."
        best = replace(best, choices=tuple(replace(choice, why=why) for choice in best.choices))
    if plain < inf:
        longer = timed[chosen] - plain
        # A machine that slowed down since the profile would save more seconds than the profiled step takes.
        best = _with_seconds(best, longer if longer > 0 else max(longer, best.baseline.seconds * longer / plain))
    return best, peaks[chosen + 1] + beside if chosen + 1 in peaks else 0


def _times(work: Workload, plans: Sequence[Plan | None]) -> tuple[list[float], dict[int, int], list[str]]:
    """Time each planned step; infinite where it fails, with the reason. None is the plain step.

    They run in turns, since the speed of a machine drifts. Peaks of compiled plans, and of all on a GPU, are measured
    too: see ``_is_measured``. The step is restored once, at the end: that copies parameters and states to the host.
    """
    seconds = [inf for _ in plans]
    failed: dict[int, str] = {}
    peaks: dict[int, int] = {}
    whole = any(map(_steps_in_backward, plans))  # then a backward pass is more than the plain step's
    others, unused = other_bytes(work, gradients=False), UnusedStorages(work)
    with unchanged(work), ExitStack() as stack:
        steps: dict[int, _Entering] = {}
        for index in [*range(len(plans))] * _ROUNDS:
            if index in failed:
                continue
            try:
                if index not in steps:
                    steps[index] = _step(work, plans[index], stack)
                with steps[index]() as step:
                    seconds[index] = min(seconds[index], *best_seconds(step, whole=whole))
                    if index not in peaks and (work.device.type == "cuda" or compiles(plans[index])):
                        peak = measured_peak(step, others + unused.bytes_beside(step))
                        peaks.update({} if peak is None else {index: peak})
            except Exception as error:  # for any reason: this plan cannot be taken
                seconds[index] = inf
                cause = cause_of(error)
                failed[index] = next(iter(str(cause).splitlines()), type(cause).__name__)
    notes = [
        f"{_name(plan)} was left out, since its step failed: {failed[index]}"
        for index, plan in enumerate(plans)
        if plan is not None and index in failed
    ]
    return seconds, peaks, notes


def _steps_in_backward(plan: Plan | None) -> bool:
    return plan is not None and not all(map(leaves_gradients, plan.options))


_Entering = Callable[[], AbstractContextManager[Workload]]


def _step(work: Workload, plan: Plan | None, stack: ExitStack) -> _Entering:
    """Enter the plain or the planned step. A captured program alone stays applied: it changes nothing else."""
    if plan is None:
        return lambda: nullcontext(work)
    if plan.choices or not ENGINES[plan.engine].captures:
        return lambda: _applied(work, plan)
    step = stack.enter_context(_applied(work, plan))
    return lambda: nullcontext(step)


@contextmanager
def _applied(work: Workload, plan: Plan) -> Generator[Workload]:
    with ENGINES[plan.engine].apply(work, plan) as applied:
        yield applied.work


def _with_seconds(plan: Plan, longer: float) -> Plan:
    """The plan with the measured difference to the plain step in place of the predicted one."""
    parts = [*plan.choices, *([plan.program] if plan.program else [])]
    off = longer - sum(part.seconds for part in parts)  # the part with the longest prediction takes the difference
    most = max(parts, key=lambda part: part.seconds, default=None)

    def measured(part: _Part) -> _Part:
        return replace(part, seconds=part.seconds + off) if part is most else part

    return replace(
        plan,
        seconds=plan.baseline.seconds + longer,
        choices=tuple(map(measured, plan.choices)),
        program=plan.program and measured(plan.program),
    )


def _name(plan: Plan) -> str:
    program = f"the {plan.engine} engine ({plan.program.lowering if plan.program else 'plain'})"
    changes = [program] if plan.program or not plan.options else []
    return " with ".join([*changes, *map(str, plan.options)])
