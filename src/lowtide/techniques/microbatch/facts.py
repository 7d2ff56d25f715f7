"""Facts about the values of a loss: how each depends on the samples of the batch.

N is the number of samples. A fact holds for the whole batch and for a piece alike.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import isclose, prod
from typing import Any, Literal

import torch
from torch import Tensor, fx

Kind = Literal["fixed", "rows", "total", "counted", "place"]
Shape = tuple[int, ...]


class UnfollowedError(LookupError):
    """Samples may mix in a value: no fact about it follows."""


def require(holds: bool) -> None:
    """Give a value up unless a condition holds."""
    if not holds:
        raise UnfollowedError


@dataclass(frozen=True)
class Fact:
    """Dependence of a value on the samples.

    ========= =====================================================================================================
    fixed     N**power times something that does not depend on the batch
    rows      a part for each sample, which depends on that sample alone, times N**power
    total     N**power times a sum over the samples, each term of which depends on its sample alone
    counted   sums over the samples, each divided by a count of ``keys``, and added
    place     the number of the sample in its batch, in the layout of rows
    ========= =====================================================================================================

    Rows lie along dimension ``dim`` of length ``outer * N * inner``. In each of the ``outer`` parts, sample i has the
    indices between ``i * inner`` and ``(i + 1) * inner``. A total with keys is itself a count of these.
    """

    kind: Kind
    power: int = 0
    dim: int = 0
    outer: int = 1
    keys: frozenset[Hashable] = frozenset()

    @property
    def is_rows(self) -> bool:
        return self.kind == "rows"

    @property
    def has_samples(self) -> bool:
        """Whether one dimension holds the samples."""
        return self.kind in ("rows", "place")

    @property
    def is_plain(self) -> bool:
        """Whether it is samples or a constant, without a power of N: any function may be taken of it."""
        return self.kind in ("fixed", "rows") and not self.power

    def at(self, dim: int, outer: int | None = None) -> Fact:
        """The same rows along another dimension."""
        return replace(self, dim=dim, outer=self.outer if outer is None else outer)

    def agrees_with(self, other: Fact) -> bool:
        """Whether both have their samples in the same order."""
        return self.kind == other.kind and self.outer == other.outer

    def uncounted(self) -> Fact:
        """The fact about a linear function of the value: it no longer is a count."""
        return self if self.kind == "counted" else replace(self, keys=frozenset())


FIXED = Fact("fixed")
SAMPLES: Hashable = "samples"  # the key of a mean over samples that stands beside a counted mean


@dataclass(frozen=True)
class Sizes:
    """The number of samples in the two captures that are compared."""

    whole: int
    part: int

    def power(self, whole: float, part: float) -> int:
        """The power of N with which a number grows from a piece to the whole.

        >>> Sizes(10, 5).power(30, 15), Sizes(10, 5).power(0.1, 0.2), Sizes(10, 5).power(3, 3)
        (1, -1, 0)
        """
        if whole == part:
            return 0
        for power in (1, -1, 2, -2):
            if part and isclose(whole / part, (self.whole / self.part) ** power, rel_tol=1e-9):
                return power
        raise UnfollowedError

    def scaled(self, whole: Shape, part: Shape) -> int | None:
        """The one dimension that holds the samples; None where the shapes are the same."""
        require(len(whole) == len(part))
        differing = [i for i, (a, b) in enumerate(zip(whole, part, strict=True)) if a != b]
        if not differing:
            return None
        (dim, *others) = differing
        require(not others and whole[dim] * self.part == part[dim] * self.whole and whole[dim] % self.whole == 0)
        return dim

    def check(self, fact: Fact, whole: Shape, part: Shape) -> None:
        """Give up unless a value of these shapes can have a fact."""
        require(self.scaled(whole, part) == (fact.dim if fact.has_samples else None))
        require(not fact.has_samples or whole[fact.dim] % (fact.outer * self.whole) == 0)


def reshaped(fact: Fact, before: Shape, after: Shape, samples: int) -> Fact:
    """Rows in a view of another shape: the dimension that has all samples again, if there is one."""
    ahead = prod(before[: fact.dim]) * fact.outer  # copies of all samples, one after the other
    for dim, length in enumerate(after):
        outer, rest = divmod(ahead, prod(after[:dim]))
        require(not rest)
        if length % (outer * samples) == 0 and length:
            return fact.at(dim, outer)
    raise UnfollowedError


def broadcast(facts: Sequence[Fact], shapes: Sequence[Shape]) -> Fact:
    """Values aligned from the last dimension, as pointwise ops do: rows where samples meet themselves alone."""
    ndim = max(map(len, shapes))
    rows = [fact.at(fact.dim + ndim - len(shape)) for fact, shape in zip(facts, shapes, strict=True) if fact.is_rows]
    require(all(each.dim == rows[0].dim and each.agrees_with(rows[0]) for each in rows))
    return rows[0] if rows else FIXED


def are_plain(facts: Iterable[Fact]) -> bool:
    return all(fact.is_plain for fact in facts)


def added(a: Fact, b: Fact, aligned: Fact = FIXED) -> Fact:
    """The sum of two values; ``aligned`` is what broadcasting makes of them."""
    kinds = {a.kind, b.kind}
    if kinds <= {"fixed", "rows"} or kinds == {"total"}:
        require(a.power == b.power)
        return replace(aligned, power=a.power) if "total" not in kinds else Fact("total", a.power)
    require(kinds <= {"fixed", "total", "counted"})
    # A constant is its own mean, and not its own sum.
    require(all(not each.power if each.kind == "fixed" else is_mean(each) for each in (a, b)))
    if kinds == {"fixed", "total"}:
        return Fact("total", -1)
    return Fact("counted", keys=a.keys | b.keys | ({SAMPLES} if "total" in kinds else set()))


def is_mean(fact: Fact) -> bool:
    return fact.kind == "counted" or (fact.kind == "total" and fact.power == -1)


def multiplied(a: Fact, b: Fact, aligned: Fact = FIXED) -> Fact:
    """The product of two values."""
    if {a.kind, b.kind} <= {"fixed", "rows"}:
        return replace(aligned, power=a.power + b.power)
    constant, other = (a, b) if a.kind == "fixed" else (b, a)
    require(constant.kind == "fixed")
    if other.kind == "total":
        return Fact("total", other.power + constant.power)
    require(other.kind == "counted" and not constant.power)
    return other


def divided(a: Fact, b: Fact, aligned: Fact = FIXED) -> Fact:
    """The quotient of two values."""
    if a.kind == b.kind == "total":
        require(bool(b.keys) and not a.power and not b.power)
        return Fact("counted", keys=b.keys)
    require(b.kind == "fixed" or (b.is_rows and a.kind in ("fixed", "rows")))
    return multiplied(a, replace(b, power=-b.power), aligned)


# -- one op, as the rules see it ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class PairedCall:
    """One op in both captures: its arguments by name, and the facts about those that are tensors or numbers."""

    op: Any  # without its overload, as ``torch.ops.aten.add``
    whole: dict[str, Any]  # arguments of the whole batch's capture
    part: dict[str, Any]  # of the piece's
    shapes: tuple[Shape, Shape]  # of the result, where it is one tensor
    facts: dict[fx.Node, Fact]
    sizes: Sizes

    def of(self, name: str) -> Fact:
        """The fact about an argument. A number that grows as N**power is fixed with that power."""
        value = self.whole[name]
        if isinstance(value, fx.Node):
            return self.facts[value]
        require(isinstance(value, (int, float)))
        return Fact("fixed", self.sizes.power(value, self.part[name]))

    def shape(self, name: str) -> Shape:
        value = self.whole[name]
        return shape_of(value) if isinstance(value, fx.Node) else ()

    def tensors(self) -> dict[str, Fact]:
        """The facts about the arguments that are tensors."""
        return {name: self.facts[value] for name, value in self.whole.items() if isinstance(value, fx.Node)}

    @property
    def ndim(self) -> int:
        """The number of dimensions of the first tensor."""
        return len(self.shape(next(iter(self.tensors()))))

    def dims(self, name: str = "dim") -> list[int]:
        """The dimensions that a reduction goes over; all where it names none."""
        dims = self.whole.get(name)
        if dims is None or dims == []:
            return list(range(self.ndim))
        return [dim % max(self.ndim, 1) for dim in (dims if isinstance(dims, (list, tuple)) else [dims])]

    def is_same(self, *names: str) -> bool:
        """Whether arguments that are neither tensors nor named here are the same in both captures."""
        return all(
            self.part.get(name) == value
            for name, value in self.whole.items()
            if name not in names and not has_nodes(value)
        )


Rule = Callable[[PairedCall], Fact]


def has_nodes(value: Any) -> bool:
    """Whether an argument is a tensor, or a list of some."""
    return isinstance(value, fx.Node) or (isinstance(value, (list, tuple)) and any(map(has_nodes, value)))


def shape_of(node: fx.Node) -> Shape:
    value = node.meta.get("val")
    return tuple(value.shape) if isinstance(value, Tensor) else ()


def is_mask(node: fx.Node) -> bool:
    return node.meta["val"].dtype is torch.bool


def op_of(node: fx.Node) -> Any:
    """The op that a node calls, without its overload; None for other nodes."""
    return getattr(node.target, "overloadpacket", None)


def constant_of(node: fx.Node) -> Any:
    """A tensor or a branch of control flow that a captured graph holds."""
    return operator.attrgetter(str(node.target))(node.graph.owning_module)
