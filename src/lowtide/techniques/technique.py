"""The shape of a technique: options on a profiled step, their prices, how to apply them, and the promised results."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn, Protocol, Self, TypeVar, cast, runtime_checkable

from lowtide.errors import PlanError

if TYPE_CHECKING:
    from lowtide.profiling.profile import Profile
    from lowtide.undo import Applied
    from lowtide.workload import Workload

Kind = Literal["rewrite", "module", "hold", "step"]  # in the order in which plans apply them
_LARGEST = 2**63  # of whole numbers in JSON


@runtime_checkable
class Technique(Protocol):
    """A way to need less memory. Third parties offer theirs through the entry point ``lowtide.techniques``.

    ``options`` and ``price`` are pure: they read the profile and touch neither the model nor a GPU.
    ``apply`` changes the model in place, or the step around it, or raises and leaves both as they were.

    Two more methods are optional. Both return findings of a class of the technique's own, which ``options`` and
    ``price`` then read by ``profile.findings.get(cls)``. ``study(work, profile)`` captures the step, where fidelity
    depends on more than a profile. ``measure(work, profile)`` runs the step once an option is a contender, and changes
    nothing. Prices may only rise by it, or a larger budget could get a slower plan.

    Techniques of the step that run the loss as it is have a third, ``inside(work, option)``. It returns the step whose
    loss they run: ``work`` itself, or ``work`` with a part of its batch or another autocast. Plans then run programs
    of that loss inside of the option. Two more methods price such options:

    - ``around(option, profile)``: the price on the step inside; without it, ``price``.
    - ``repeats(option)``: how often the loss inside runs in one step; without it, once.
    """

    name: str
    kind: Kind
    needs: str  # requirements on the model, in words: "a nn.Sequential of two or more blocks"
    conflicts: Mapping[str, str] = {}  # names of techniques that cannot be in one plan with it, and why
    config: type[Config]  # of its options; Config itself where they have no settings

    def options(self, profile: Profile) -> Sequence[Option]:
        """List the places where it could act, each with a config; none where it has nothing to offer."""
        ...

    def price(self, option: Option, profile: Profile) -> Price:
        """Price an option by the live intervals and seconds that it changes in the profiled step."""
        ...

    def apply(self, work: Workload, options: Sequence[Option]) -> Applied:
        """Apply options. The result holds the step to run; calling it restores the model bit for bit."""
        ...

    def check(self, option: Option) -> Check:
        """State the results that the changed step promises, compared with the plain one."""
        ...


class Fidelity(StrEnum):
    """Promise about a step's results, from the strictest class to the loosest.

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
        return _RANKS[self]

    def __lt__(self, other: str) -> bool:
        return self.rank < _RANKS[Fidelity(other)]

    def __le__(self, other: str) -> bool:
        return self.rank <= _RANKS[Fidelity(other)]

    def __gt__(self, other: str) -> bool:
        return self.rank > _RANKS[Fidelity(other)]

    def __ge__(self, other: str) -> bool:
        return self.rank >= _RANKS[Fidelity(other)]


_RANKS = {fidelity: rank for rank, fidelity in enumerate(Fidelity)}  # searches compare hundreds of thousands


@dataclass(frozen=True)
class Config:
    """Settings of an option: subclass it as a frozen dataclass, and check the fields in ``__post_init__``.

    Fields hold plain values (numbers, text, None, tuples of them), so that an option can be compared, hashed and
    written as JSON. ``Config()`` itself is for techniques without settings.
    """

    def __str__(self) -> str:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        shown = {name: value for name, value in values.items() if value not in ("", None) and value is not False}
        texts = (name if value is True else f"{name} {value}" for name, value in shown.items())
        return ", ".join(text for text, value in zip(texts, shown.values(), strict=True) if type(value) is not tuple)

    def require(self, name: str, kind: type, *, least: float | None = None, above: float | None = None) -> None:
        """Raise ``PlanError`` unless a field has this type and is large enough; a bool is no int."""
        value: Any = getattr(self, name)
        if type(value) is not kind or (least is not None and value < least) or (above is not None and value <= above):
            limits = [f"at least {least:g}"] if least is not None else []
            limits += [f"above {above:g}"] if above is not None else []
            self.refuse(name, ", ".join([f"must be of type {kind.__name__}", *limits]))

    def require_one_of(self, name: str, known: Iterable[object]) -> None:
        """Raise ``PlanError`` unless a field has one of these values."""
        value, choices = getattr(self, name), tuple(known)
        if not any(type(value) is type(choice) and value == choice for choice in choices):
            self.refuse(name, f"is not one of {', '.join(map(repr, choices))}")

    def refuse(self, name: str, why: str) -> NoReturn:
        """Raise ``PlanError`` with a field's name and value."""
        raise PlanError(f"{type(self).__name__}: {name}={reprlib.repr(getattr(self, name))} {why}")

    def check_site(self, site: tuple[str, ...]) -> None:
        """Raise ``PlanError`` where the config does not fit the site of its option."""

    @classmethod
    def from_json(cls, data: Any) -> Self:
        """Read the fields as JSON holds them; refuse unknown, missing and malformed ones."""
        if not isinstance(data, Mapping):
            raise PlanError(f"{cls.__name__} is an object with fields, not {reprlib.repr(data)}")
        values = cast(Mapping[str, Any], data)
        known = {field.name: field.default is not MISSING for field in fields(cls)}
        unknown = sorted(map(str, values.keys() - known.keys()))
        missing = sorted(name for name, has_default in known.items() if not has_default and name not in values)
        if unknown or missing:
            problem = f"has no field {unknown[0]!r}" if unknown else f"needs the field {missing[0]!r}"
            raise PlanError(f"{cls.__name__} {problem}", hint=f"Its fields: {', '.join(known) or 'none'}.")
        return cls(**{name: _from_json(value, f"{cls.__name__}: {name}") for name, value in values.items()})


def _from_json(value: Any, where: str) -> Any:
    """Read a plain value; lists become tuples."""
    if isinstance(value, list | tuple):
        return tuple(_from_json(item, where) for item in cast(Sequence[Any], value))
    if isinstance(value, int) and abs(value) >= _LARGEST:
        raise PlanError(f"{where} cannot be an integer beyond 64 bits")
    if value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise PlanError(f"{where} cannot be {reprlib.repr(value)}")


_Config = TypeVar("_Config", bound=Config)


@dataclass(frozen=True, slots=True)
class Option:
    """One place where a technique can act, and its config: all that ``apply`` needs.

    >>> print(Option("optimizer_in_backward", ("",)))
    optimizer_in_backward on the model
    """

    technique: str
    site: tuple[str, ...]  # module paths; ("",) is the model itself
    config: Config = Config()

    def __post_init__(self) -> None:
        if not isinstance(self.config, Config):
            raise PlanError(f"The config of {self.technique} is {reprlib.repr(self.config)}, not a Config")
        self.config.check_site(self.site)

    def config_as(self, kind: type[_Config]) -> _Config:
        """The config, of the type that its technique declares; else PlanError."""
        if not isinstance(self.config, kind):
            raise PlanError(f"{self.technique} is configured by {kind.__name__}, not {type(self.config).__name__}")
        return self.config

    def __str__(self) -> str:
        places = [path or "the model" for path in self.site]
        places[3:] = [f"{len(places) - 3} more"] if len(places) > 4 else places[3:]
        settings = str(self.config)
        return f"{self.technique} on {', '.join(places)}" + (f" ({settings})" if settings else "")


def whole_step(options: Sequence[Option]) -> Option:
    """The one option of a technique that acts once, on the whole step; PlanError for any other list."""
    if len(options) != 1 or options[0].site != ("",):
        raise PlanError(
            f"The technique acts once, on the whole step, and not on {', '.join(map(str, options)) or 'nothing'}",
            hint='Give one option whose site is ("",).',
        )
    return options[0]


def loss_for_peaks(loss: Any) -> Any:
    """A loss with the same peaks, for a trace that needs nothing else; the loss itself where it offers none.

    A loss that repeats itself offers one by a method ``for_peaks()``, and may skip repetitions there.
    """
    shorter = getattr(loss, "for_peaks", None)
    return loss if shorter is None else shorter()


@dataclass(frozen=True, slots=True)
class Interval:
    """Bytes that are alive while ops ``birth`` to ``death - 1`` of the profiled step run."""

    bytes: int
    birth: int
    death: int
    why: str


@dataclass(frozen=True, slots=True)
class Price:
    """Changes that an option makes. Not one number: a peak is a maximum over time, and copies overlap with compute.

    Intervals are on the axis of the profiled step's ops; empty ones are left out. A recomputed value is removed from
    the op that frees it until its first use in the backward pass.
    """

    fidelity: Fidelity
    added: tuple[Interval, ...] = ()
    removed: tuple[Interval, ...] = ()
    compute_seconds: float = 0.0
    h2d_seconds: float = 0.0
    d2h_seconds: float = 0.0
    host_bytes: int = 0
    source: Literal["measured", "modelled"] = "modelled"

    def __post_init__(self) -> None:
        for name in ("added", "removed"):
            lasting = tuple(interval for interval in getattr(self, name) if interval.birth < interval.death)
            object.__setattr__(self, name, lasting)

    @property
    def seconds(self) -> float:
        """Seconds that the step takes longer if nothing overlaps; nan where the profile holds none."""
        return self.compute_seconds + self.h2d_seconds + self.d2h_seconds

    @classmethod
    def together(cls, prices: Sequence[Price]) -> Price:
        """The price of options in one step: the loosest fidelity, all intervals, the sums of the rest."""
        return cls(
            max(price.fidelity for price in prices),
            added=tuple(interval for price in prices for interval in price.added),
            removed=tuple(interval for price in prices for interval in price.removed),
            compute_seconds=sum(price.compute_seconds for price in prices),
            h2d_seconds=sum(price.h2d_seconds for price in prices),
            d2h_seconds=sum(price.d2h_seconds for price in prices),
            host_bytes=sum(price.host_bytes for price in prices),
            source="measured" if all(price.source == "measured" for price in prices) else "modelled",
        )


@dataclass(frozen=True, slots=True)
class Check:
    """Agreement that must hold between the plain step and the changed one.

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
