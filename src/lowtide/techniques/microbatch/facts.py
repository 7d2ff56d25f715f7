"""Facts about the values of a loss: how each depends on the samples of the batch.

N is the number of samples. Every fact is about the whole batch and about a piece alike, so that it tells what a piece
computes of its own samples.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import isclose, prod
from typing import Any, Literal

from torch import Tensor, fx

Kind = Literal["fixed", "rows", "total", "counted", "place"]
Shape = tuple[int, ...]


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

    Rows lie along dimension ``dim`` of length ``outer * N * inner``, where sample i has the indices between ``i *
    inner`` and ``(i + 1) * inner`` of each of the ``outer`` parts. A total with keys is itself a count of these.
    """

    kind: Kind
    power: int = 0
    dim: int = 0
    outer: int = 1
    keys: frozenset[Hashable] = frozenset()

    def at(self, dim: int, outer: int | None = None) -> Fact:
        """The same rows along another dimension."""
        return replace(self, dim=dim, outer=self.outer if outer is None else outer)

    def agrees_with(self, other: Fact) -> bool:
        """Whether both have their samples in the same order."""
        return self.kind == other.kind and self.outer == other.outer


FIXED = Fact("fixed")
TOTAL = Fact("total")
SAMPLES: Hashable = "samples"  # the key of a mean over samples that stands beside a counted mean


@dataclass(frozen=True)
class Sizes:
    """The number of samples in the two captures that are compared."""

    whole: int
    part: int

    def power(self, whole: float, part: float) -> int | None:
        """The power of N with which a number grows from a piece to the whole; None for any other growth.

        >>> Sizes(10, 5).power(30, 15), Sizes(10, 5).power(0.1, 0.2), Sizes(10, 5).power(3, 3), Sizes(10, 5).power(9, 4)
        (1, -1, 0, None)
        """
        if whole == part:
            return 0
        for power in (1, -1, 2, -2):
            if part and isclose(whole / part, (self.whole / self.part) ** power, rel_tol=1e-9):
                return power
        return None

    def scaled(self, whole: Shape, part: Shape) -> int | None:
        """The one dimension that holds the samples; -1 where none differs, None where there is no such one."""
        if len(whole) != len(part):
            return None
        differing = [i for i, (a, b) in enumerate(zip(whole, part, strict=True)) if a != b]
        if not differing:
            return -1
        dim = differing[0]
        is_scaled = whole[dim] * self.part == part[dim] * self.whole and whole[dim] % self.whole == 0
        return dim if len(differing) == 1 and is_scaled else None

    def holds(self, fact: Fact, whole: Shape, part: Shape) -> bool:
        """Whether a value of these shapes can have a fact."""
        dim = self.scaled(whole, part)
        if fact.kind not in ("rows", "place"):
            return dim == -1
        return dim == fact.dim and whole[fact.dim] % (fact.outer * self.whole) == 0


def reshaped(fact: Fact, before: Shape, after: Shape, samples: int) -> Fact | None:
    """Rows in a view of another shape: the dimension that has all samples again, if there is one."""
    ahead = prod(before[: fact.dim]) * fact.outer  # copies of all samples, one after the other
    for dim, length in enumerate(after):
        outer, rest = divmod(ahead, prod(after[:dim]))
        if rest:
            return None
        if length % (outer * samples) == 0 and length:
            return fact.at(dim, outer)
    return None


def broadcast(facts: Sequence[Fact], shapes: Sequence[Shape]) -> Fact | None:
    """Values aligned from the last dimension, as pointwise ops do: rows where samples meet themselves alone."""
    ndim = max(map(len, shapes))
    rows = [fact.at(fact.dim + ndim - len(shape)) for fact, shape in zip(facts, shapes, strict=True) if is_rows(fact)]
    if not rows:
        return FIXED
    return rows[0] if all(each.dim == rows[0].dim and each.agrees_with(rows[0]) for each in rows) else None


def is_rows(fact: Fact) -> bool:
    return fact.kind == "rows"


def are_plain(facts: Iterable[Fact]) -> bool:
    """Whether these are samples and constants alone, without powers of N: any function may be taken of them."""
    return all(fact.kind in ("fixed", "rows") and not fact.power for fact in facts)


def added(a: Fact, b: Fact, aligned: Fact | None) -> Fact | None:
    """The sum of two values; ``aligned`` is what broadcasting makes of them."""
    kinds = {a.kind, b.kind}
    if kinds <= {"fixed", "rows"}:
        return replace(aligned, power=a.power) if aligned is not None and a.power == b.power else None
    if kinds == {"total"}:
        return Fact("total", a.power) if a.power == b.power else None
    if kinds == {"counted"}:
        return Fact("counted", keys=a.keys | b.keys)
    if kinds in ({"fixed", "total"}, {"fixed", "counted"}):  # a constant is its own mean, and not its own sum
        mean, constant = (b, a) if a.kind == "fixed" else (a, b)
        is_mean = mean.kind == "counted" or mean.power == -1
        return mean if is_mean and not constant.power else None
    if kinds == {"total", "counted"}:
        total = a if a.kind == "total" else b
        return Fact("counted", keys=a.keys | b.keys | {SAMPLES}) if total.power == -1 else None
    return None


def multiplied(a: Fact, b: Fact, aligned: Fact | None) -> Fact | None:
    """The product of two values."""
    kinds = {a.kind, b.kind}
    if kinds <= {"fixed", "rows"}:
        return replace(aligned, power=a.power + b.power) if aligned is not None else None
    if "fixed" not in kinds:
        return None
    constant, other = (a, b) if a.kind == "fixed" else (b, a)
    if other.kind == "total":
        return Fact("total", other.power + constant.power)
    return other if other.kind == "counted" and not constant.power else None


def divided(a: Fact, b: Fact, aligned: Fact | None) -> Fact | None:
    """The quotient of two values."""
    if b.kind == "total" and b.keys and not b.power and a.kind == "total" and not a.power:
        return Fact("counted", keys=b.keys)
    if b.kind not in ("fixed", "rows") or (b.kind == "rows" and a.kind not in ("fixed", "rows")):
        return None
    return multiplied(a, replace(b, power=-b.power), aligned)


# -- one op, as the rules see it ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class PairedCall:
    """One op in both captures: its arguments by name, and the facts about those that are tensors or numbers."""

    name: str  # of the op, without its overload
    whole: dict[str, Any]  # arguments of the whole batch's capture
    part: dict[str, Any]  # of the piece's
    shapes: tuple[Shape, Shape]  # of the result, where it is one tensor
    facts: dict[fx.Node, Fact]
    sizes: Sizes

    def of(self, name: str) -> Fact | None:
        """The fact about an argument. A number that grows as N**power is fixed with that power."""
        value = self.whole.get(name)
        if isinstance(value, fx.Node):
            return self.facts.get(value)
        if isinstance(value, (int, float)):
            power = self.sizes.power(value, self.part[name])
            return None if power is None else Fact("fixed", power)
        return None

    def shape(self, name: str) -> Shape:
        value = self.whole[name]
        return shape_of(value) if isinstance(value, fx.Node) else ()

    def tensors(self) -> list[str]:
        """The names of the arguments that are tensors."""
        return [name for name, value in self.whole.items() if isinstance(value, fx.Node)]

    def dims(self, name: str = "dim") -> list[int]:
        """The dimensions that a reduction goes over; all where it names none."""
        ndim, dims = len(self.shape(self.tensors()[0])), self.whole.get(name)
        if dims is None or dims == []:
            return list(range(ndim))
        return [dim % max(ndim, 1) for dim in (dims if isinstance(dims, (list, tuple)) else [dims])]

    def is_same(self, *names: str) -> bool:
        """Whether arguments that are neither tensors nor named here are the same in both captures."""
        return all(
            self.part.get(name) == value
            for name, value in self.whole.items()
            if name not in names and not has_nodes(value)
        )


Rule = Callable[[PairedCall], Fact | None]


def has_nodes(value: Any) -> bool:
    """Whether an argument is a tensor, or a list of some."""
    return isinstance(value, fx.Node) or (isinstance(value, (list, tuple)) and any(map(has_nodes, value)))


def shape_of(node: fx.Node) -> Shape:
    value = node.meta.get("val")
    return tuple(value.shape) if isinstance(value, Tensor) else ()


def constant_of(node: fx.Node) -> Tensor:
    """A tensor that a captured graph holds."""
    return operator.attrgetter(str(node.target))(node.graph.owning_module)
