"""``plans``: the steps predicted to be the fastest whose allocated peak fits a budget in bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lowtide.errors import BudgetError, LowtideError, PlanError
from lowtide.fingerprint import Fingerprint
from lowtide.planning.candidate import Contender, Permission
from lowtide.planning.engine import AUTO, engines_named
from lowtide.planning.lowering import LOWERINGS
from lowtide.planning.plan import Baseline, Choice, Plan
from lowtide.planning.refusal import no_plan
from lowtide.planning.search import CLOSE, Search
from lowtide.profiling import Profile
from lowtide.profiling.devices import find_device
from lowtide.registry import PLAIN_ENGINE
from lowtide.sizes import format_size, parse_size
from lowtide.techniques.registry import techniques
from lowtide.techniques.technique import Option
from lowtide.workload import Workload

_FRAGMENTATION = 0.03  # of a GPU, what the allocator is expected to lose
_LARGEST_SHARE = 1e9  # in percent: more is a slip, and soon no number of bytes
_CONTEXT_BYTES = 600 * 2**20  # of a GPU that is not here, what its CUDA context takes


def plans(
    work: Workload,
    budget: float | str,
    baseline: Profile,
    *,
    permitted: Permission,
    engine: str = AUTO,
    compile: bool | None = False,
    most: int = 1,
    close: float = CLOSE,
    reserved: int = 0,
) -> list[Plan]:
    """The plan predicted to be the fastest, then at most ``most - 1`` others of other techniques or engines.

    They are predicted to take at most ``close`` times as long as the first. ``baseline`` is the plain step's profile:
    for one of them, a larger budget never gives a slower first plan. ``reserved`` bytes of the budget are left, where
    plans measured above their prediction. ``lowtide.plan`` times them and takes one.
    """
    fingerprint = Fingerprint.of(work)
    _check_profile(baseline, fingerprint)
    wanted = resolve_budget(budget, baseline.peak_bytes, baseline.graph.device, baseline.other_bytes)
    room = wanted.bytes - reserved
    may_compile = compile is not False and any(each.captures for each in engines_named(engine))
    fits = baseline.peak_bytes <= room and not may_compile  # compiled code is faster than the plain step
    search = Search(work, baseline, PLAIN_ENGINE if fits else engine, room, permitted, compile=compile)
    rivals = search.contenders(room, permitted, most=1 if fits else most, close=close)
    if not rivals:
        raise no_plan(search, wanted.bytes, permitted, reserved)
    base = Baseline(baseline.peak_bytes, baseline.storage_peak_bytes, baseline.seconds)
    return [
        Plan(
            engine=rival.candidate.engine,
            budget_bytes=wanted.bytes,
            peak_bytes=rival.peak_bytes,
            storage_peak_bytes=rival.storage_peak_bytes,
            seconds=base.seconds + rival.candidate.price.seconds,
            seconds_source=baseline.seconds_source,
            baseline=base,
            choices=_choices(rival, search.saved_bytes(rival), search.faster_peak(rival, permitted), wanted.bytes),
            fingerprint=fingerprint,
            device=baseline.graph.device,
            notes=_notes(wanted, search, rival, permitted),
            program=search.program(rival, wanted.bytes),
            permission=permitted,
        )
        for rival in rivals
    ]


def _notes(wanted: Budget, search: Search, rival: Contender, permitted: Permission) -> tuple[str, ...]:
    outlook = search.outlook(rival, wanted.bytes, permitted)
    notes = (wanted.said, *outlook, *search.notes, _estimated(rival), _lowered(rival))
    return tuple(filter(None, notes))


@dataclass(frozen=True, slots=True)
class Budget:
    """A budget in bytes, and how it was found where that needs saying."""

    bytes: int
    said: str = ""


def resolve_budget(budget: float | str, baseline_peak: int, device: str, other_bytes: int = 0) -> Budget:
    """A budget as people write it, in bytes.

    >>> resolve_budget("60%", 1000, "cpu").bytes, resolve_budget("6GiB", 1000, "cpu").bytes
    (600, 6442450944)
    """
    if budget == "device":
        return _device_budget(device, other_bytes)
    if isinstance(budget, str) and budget.strip().endswith("%"):
        try:
            share = float(budget.strip()[:-1])
        except ValueError:
            share = math.nan
        if not 0 < share < _LARGEST_SHARE:
            raise BudgetError(f"Not a share of the plain step's peak: {budget!r}", hint="Write for example 60%.")
        size = int(baseline_peak * share / 100)
        return Budget(size, f"{budget.strip()} of the plain step's {format_size(baseline_peak)}")
    try:
        return Budget(parse_size(budget))
    except LowtideError as error:
        raise BudgetError(str(error)) from error


def _check_profile(profile: Profile, fingerprint: Fingerprint) -> None:
    differs = profile.fingerprint and profile.fingerprint.difference(fingerprint, was="profiled")
    if differs:
        raise PlanError(f"The profile is of {differs}", hint="Leave profile= out, or profile this step.")


def _choices(rival: Contender, saved: Sequence[int], faster_peak: int, budget: int) -> tuple[Choice, ...]:
    candidate = rival.candidate
    prices = candidate.prices[candidate.is_program :] or (candidate.price,)
    above = f": what is faster peaks at {format_size(faster_peak)} or more" if faster_peak else ""
    why = f"Predicted to be the fastest that fits {format_size(budget)}{above}."
    return tuple(
        Choice(option, price.fidelity, size, price.seconds, why)
        for option, price, size in zip(candidate.options, prices, saved, strict=bool(candidate.options))
    )


def _estimated(rival: Contender) -> str:
    """Say that seconds are an estimate where others of the technique are measured."""
    option, price = rival.candidate.change, rival.candidate.price
    if not isinstance(option, Option) or price.source == "measured":
        return ""
    measures = hasattr(techniques()[option.technique], "measure")
    return f"The seconds of {option.technique} are an estimate: it was not run." if measures else ""


def _lowered(rival: Contender) -> str:
    """Say in which ways a program's code differs from the plain step."""
    lowering = rival.candidate.lowering
    return LOWERINGS[lowering].note if lowering else ""


def _device_budget(device: str, other_bytes: int) -> Budget:
    if device == "cpu":
        raise BudgetError("budget='device' is about a GPU, and the step is on a CPU", hint="Write a size: 6GiB.")
    if device == "cuda" and torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        outside = total - free - torch.cuda.memory_reserved()
        whose = "the CUDA context and other processes have"
    else:
        total, outside = find_device(device).memory_bytes, _CONTEXT_BYTES
        whose = "the CUDA context will take about"
    if other_bytes:
        outside += other_bytes
        whose = f"other tensors of this process, {whose}"
    lost = int((total - outside) * _FRAGMENTATION)
    return Budget(
        total - outside - lost,
        f"The GPU has {format_size(total)}, of which {whose} {format_size(outside)}, "
        f"and {format_size(lost)} are left for fragmentation.",
    )
