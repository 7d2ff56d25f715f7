"""The shape of a technique: where it can act, what that costs, how to do it, and what must then hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeAlias, TypeVar, runtime_checkable

from lowtide.errors import PlanError

if TYPE_CHECKING:
    from lowtide.profiling.profile import Profile
    from lowtide.undo import Applied
    from lowtide.workload import Workload

Kind = Literal["module", "saved", "step"]
Knob: TypeAlias = "bool | int | float | str | tuple[Knob, ...]"
_Value = TypeVar("_Value")


@runtime_checkable
class Technique(Protocol):
    """A way to need less memory. Third parties offer theirs through the entry point ``lowtide.techniques``.

    ``options`` and ``price`` are pure: they read the profile and touch neither the model nor a GPU.
    ``apply`` changes the model in place, or the step around it, or raises and leaves both as they were.
    Where fidelity depends on more than a profile, a method ``study(work, profile)`` is called before ``options``.
    Where seconds do, ``measure(work, profile)`` runs the step once an option is a contender, and changes nothing.
    Prices may only rise by it, or a larger budget could get a slower plan.
    """

    name: str
    kind: Kind
    needs: str  # what a model must have for it, in words: "a nn.Sequential of two or more blocks"
    conflicts: Mapping[str, str]  # names of techniques that cannot be in one plan with it, and why

    def options(self, profile: Profile) -> Sequence[Option]:
        """Where it could act, with its knobs; none where it has nothing to offer."""
        ...

    def price(self, option: Option, profile: Profile) -> Price:
        """What an option would change in the profiled step."""
        ...

    def apply(self, work: Workload, options: Sequence[Option]) -> Applied:
        """Do it: the step that runs from now on, which also restores the model bit for bit when it is called."""
        ...

    def check(self, option: Option) -> Check:
        """What must hold between the plain step and this one."""
        ...


class Fidelity(StrEnum):
    """What a step promises about its results, from the strictest class to the loosest.

    >>> Fidelity.BITWISE < Fidelity.APPROXIMATE, Fidelity("roundoff"), max(Fidelity).value
    (True, <Fidelity.ROUNDOFF: 'roundoff'>, 'changed')
    """

    BITWISE = "bitwise"  # loss, gradients, buffers and RNG equal the plain step's bit for bit
    ROUNDOFF = "roundoff"  # the same mathematics, rounded otherwise
    UNBIASED = "unbiased"  # random, right on average
    APPROXIMATE = "approximate"  # a stated bound on the gradient's error
    CHANGED = "changed"  # another algorithm or model; no bound

    @property
    def rank(self) -> int:
        """0 for the strictest class."""
        return list(Fidelity).index(self)

    def __lt__(self, other: str) -> bool:
        return self.rank < Fidelity(other).rank

    def __le__(self, other: str) -> bool:
        return self.rank <= Fidelity(other).rank

    def __gt__(self, other: str) -> bool:
        return self.rank > Fidelity(other).rank

    def __ge__(self, other: str) -> bool:
        return self.rank >= Fidelity(other).rank


@dataclass(frozen=True, slots=True)
class Option:
    """One place where a technique can act, and how: all that ``apply`` needs to know.

    Knobs hold plain values, so that an option can be compared, hashed and written as JSON.
    """

    technique: str
    site: tuple[str, ...]  # module paths; ("",) is the model itself
    knobs: tuple[tuple[str, Knob], ...] = ()

    def knob(self, name: str, default: Knob = 0) -> Knob:
        """The value of a knob.

        >>> Option("sqrt", ("layers",), (("segments", 4),)).knob("segments")
        4
        """
        return dict(self.knobs).get(name, default)

    def read(self, name: str, default: _Value, *, least: float | None = None) -> _Value:
        """The value of a knob, of its default's type and not below ``least``; else PlanError."""
        value: Any = dict(self.knobs).get(name, default)
        too_small = least is not None and isinstance(value, (int, float)) and value < least
        if too_small or type(value) is not type(default):
            limit = "" if least is None else f" of at least {least:g}"
            raise PlanError(f"{name}={value!r} is not a {type(default).__name__}{limit}", where=str(self))
        return value

    def one_of(self, name: str, known: Iterable[_Value], default: Knob = "") -> _Value:
        """The value of a knob that takes one of some values; else PlanError.

        >>> Option("optimizer_state", ("",), (("state", "8bit"),)).one_of("state", ("8bit", "4bit"))
        '8bit'
        """
        value: Any = self.knob(name, default)
        known = tuple(known)
        if value not in known:
            raise PlanError(f"{name}={value!r} is none of {', '.join(map(str, known))}", where=str(self))
        return known[known.index(value)]

    def by_site(self, name: str) -> dict[str, Knob]:
        """The values of a knob that has one for each site; else PlanError."""
        values = self.knob(name, ())
        if not isinstance(values, tuple) or len(values) != len(self.site):
            raise PlanError(f"{name}={values!r} is not one value for each site", where=str(self))
        return dict(zip(self.site, values, strict=True))

    def __str__(self) -> str:
        shown = [f"{name} {value}" for name, value in self.knobs if not isinstance(value, tuple) and value != ""]
        places = [path or "the model" for path in self.site]
        places[3:] = [f"{len(places) - 3} more"] if len(places) > 4 else places[3:]
        where = ", ".join(places)
        return f"{self.technique} on {where}" + (f" ({', '.join(shown)})" if shown else "")


def whole_step(options: Sequence[Option]) -> Option:
    """The one option of a technique that acts once, on the whole step; PlanError for any other list."""
    if len(options) != 1 or options[0].site != ("",):
        raise PlanError(
            f"The technique acts once, on the whole step, and not on {', '.join(map(str, options)) or 'nothing'}",
            hint='Give one option whose site is ("",).',
        )
    return options[0]


@dataclass(frozen=True, slots=True)
class Interval:
    """Bytes that are alive while ops ``birth`` to ``death - 1`` of the profiled step run."""

    bytes: int
    birth: int
    death: int
    why: str


@dataclass(frozen=True, slots=True)
class Price:
    """What an option changes. Not one number: a peak is a maximum over time, and copies overlap with compute.

    Intervals are on the axis of the profiled step's ops: what is made again in the backward pass is removed
    from where it was let go until its first use there.
    """

    fidelity: Fidelity
    added: tuple[Interval, ...] = ()
    removed: tuple[Interval, ...] = ()
    compute_seconds: float = 0.0
    h2d_seconds: float = 0.0
    d2h_seconds: float = 0.0
    host_bytes: int = 0
    source: Literal["measured", "modelled"] = "modelled"

    @property
    def seconds(self) -> float:
        """What the step takes longer if nothing overlaps; nan where the profile holds no seconds."""
        return self.compute_seconds + self.h2d_seconds + self.d2h_seconds


@dataclass(frozen=True, slots=True)
class Check:
    """What must hold between the plain step and the changed one.

    ``bitwise`` means ``torch.equal``. For the other classes, ``|changed - plain| <= atol + rtol * |plain|``
    in the norm of each gradient; unbiased ones keep it on average. ``roundoff`` without a tolerance is held to the
    rounding that ``verify`` measures in the step itself.
    """

    fidelity: Fidelity
    rtol: float = 0.0
    atol: float = 0.0
    same_state_dict: bool = True  # the keys, shapes, dtypes and values, while applied
    leaves_gradients: bool = True  # in ``.grad`` after backward, until the optimizer's step

    EXACT: ClassVar[Check]


Check.EXACT = Check(Fidelity.BITWISE)
