"""One op of a captured loss, as the rules see it: arguments by name, and the facts about them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from lowtide.techniques.microbatch.facts import Fact, Shape, Sizes


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
