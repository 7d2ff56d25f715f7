"""The techniques there are: lowtide's own, those of installed packages, those that a session registers."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, get_args

from lowtide.errors import LowtideError, PlanError
from lowtide.techniques.technique import Config, Kind, Technique
from lowtide.undo import Undo

if TYPE_CHECKING:
    from lowtide.profiling.profile import Profile
    from lowtide.workload import Workload

GROUP = "lowtide.techniques"

# Not entry points: a source tree that was never installed has none.
BUILT_IN = (
    "lowtide.techniques.sqrt:Sqrt",
    "lowtide.techniques.optimal:Optimal",
    "lowtide.techniques.batchnorm.technique:BatchNorm",
    "lowtide.techniques.compress.technique:Compress",
    "lowtide.techniques.microbatch.technique:Microbatch",
    "lowtide.techniques.chunked_loss:ChunkedLoss",
    "lowtide.techniques.precision:Precision",
    "lowtide.techniques.optimizer_state:OptimizerState",
    "lowtide.techniques.optimizer_in_backward:OptimizerInBackward",
    "lowtide.techniques.stored_gradients:StoredGradients",
    "lowtide.techniques.randomized:RandomizedLinears",
    "lowtide.techniques.fewbit:FewBitActivations",
)

_registered: dict[str, Technique] = {}


def techniques() -> dict[str, Technique]:
    """Every technique by its name: built in, installed, registered.

    >>> "sqrt" in techniques()
    True
    """
    known = dict(_installed())
    for technique in _registered.values():
        _add(known, technique)
    return known


def find_technique(name: str) -> Technique:
    """The technique of a name; PlanError where it is not installed."""
    known = techniques()
    if name not in known:
        raise PlanError(
            f"There is no technique {name!r} here",
            hint=f"Install or register it. There are: {', '.join(sorted(known))}.",
        )
    return known[name]


def study(work: Workload, profile: Profile) -> None:
    """Let techniques with a method ``study`` capture a profiled step. The profile keeps their findings."""
    for technique in techniques().values():
        look = getattr(technique, "study", None)
        if look is not None:
            profile.findings.keep(look(work, profile))


def measure(name: str, work: Workload, profile: Profile) -> None:
    """Let a technique with a method ``measure`` run a part of the step. The profile keeps its findings."""
    technique: Any = find_technique(name)
    profile.findings.keep(technique.measure(work, profile))


def register(technique: object) -> Undo:
    """Add a technique for this session; the undo takes it out again. Packages use the entry point instead."""
    technique = _checked(technique)
    _add(techniques(), technique)
    _registered[technique.name] = technique
    return Undo(lambda: _registered.pop(technique.name, None))


@cache
def _installed() -> dict[str, Technique]:
    known: dict[str, Technique] = {}
    for place in BUILT_IN:
        _add(known, _load(EntryPoint(place, place, GROUP)))
    for point in entry_points(group=GROUP):
        if point.value.startswith("lowtide."):  # listed by an older installation
            continue
        try:
            technique = _load(point)
        except Exception as error:
            warnings.warn(
                f"The technique {point.name!r} ({point.value}) cannot be used: {error}",
                RuntimeWarning,
                stacklevel=3,
            )
        else:
            _add(known, technique)
    return known


def _load(point: EntryPoint) -> Technique:
    offered = point.load()
    return _checked(offered() if isinstance(offered, type) else offered)


def _checked(technique: object) -> Technique:
    if not isinstance(technique, Technique):
        raise LowtideError(
            f"{technique!r} is not a technique",
            hint="It needs name, kind, needs, conflicts, config, options, price, apply and check.",
        )
    checks = {
        "kind": (technique.kind in get_args(Kind), f"one of {', '.join(get_args(Kind))}"),
        "conflicts": (isinstance(technique.conflicts, Mapping), "a mapping from names to reasons"),
        "config": (isinstance(technique.config, type) and issubclass(technique.config, Config), "a subclass of Config"),
    }
    for name, (is_right, wanted) in checks.items():
        if not is_right:
            raise LowtideError(
                f"The technique {technique.name!r} has {name}={getattr(technique, name)!r}",
                hint=f"Its {name} is {wanted}.",
            )
    return technique


def _add(known: dict[str, Technique], technique: Technique) -> None:
    there = known.get(technique.name)
    if there is not None:
        raise LowtideError(
            f"Two techniques have the name {technique.name!r}: {_place(there)} and {_place(technique)}",
            hint="Rename one of them.",
        )
    known[technique.name] = technique


def _place(technique: Technique) -> str:
    return f"{type(technique).__module__}.{type(technique).__qualname__}"
