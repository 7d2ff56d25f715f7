"""Engines, lowerings and solvers by name, each imported when it is first used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from lowtide.errors import PlanError
from lowtide.undo import Undo


class BuiltIn(NamedTuple):
    """Place of a class, as text since planning may not import engines; and its work in a few words."""

    place: str
    summary: str


PLAIN_ENGINE = "eager"  # applies options of techniques to the user's own modules, and captures nothing
PLAIN_LOWERING = "ops"  # runs every program
NEEDS_NO_CAPTURE = f"The {PLAIN_ENGINE} engine needs no capture."  # a hint of errors about captures

BUILT_IN: Mapping[str, Mapping[str, BuiltIn]] = {
    "engine": {
        PLAIN_ENGINE: BuiltIn("lowtide.engines.eager:EagerEngine", "the model's own code"),
        "graph": BuiltIn("lowtide.engines.graph:GraphEngine", "a captured graph"),
    },
    "lowering": {
        PLAIN_LOWERING: BuiltIn("lowtide.engines.lowering.ops:OpsLowering", "one op after another"),
        "rewritten": BuiltIn("lowtide.engines.lowering.rewritten:RewrittenLowering", "rewrites, one op after another"),
        "compiled": BuiltIn("lowtide.engines.lowering.compiled:CompiledLowering", "regions compiled by Inductor"),
        "seeded": BuiltIn("lowtide.engines.lowering.compiled:SeededLowering", "compiled programs, op by op"),
    },
    "solver": {
        "chain": BuiltIn("lowtide.planning.solvers.chain:ChainSolver", "optimal schedules of a chain of stages"),
        "graph": BuiltIn("lowtide.planning.solvers.graph:GraphSolver", "any graph, value by value"),
        "blocks": BuiltIn("lowtide.planning.solvers.blocks:BlockSolver", "equal blocks alike, for compiled code"),
    },
}


class Named(Protocol):
    """An implementation with the name that plans and users write."""

    @property
    def name(self) -> str: ...


T = TypeVar("T", bound=Named)


class Registry(Generic[T]):
    """Implementations of one contract: those of ``BUILT_IN``, and others by ``register``."""

    def __init__(self, contract: str) -> None:
        self.contract = contract
        self._built_in = BUILT_IN[contract]
        self._loaded: dict[str, T] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys((*self._built_in, *self._loaded)))

    def __contains__(self, name: object) -> bool:
        return name in self._built_in or name in self._loaded

    def __getitem__(self, name: str) -> T:
        if name not in self:
            raise PlanError(f"There is no {self.contract} {name!r}", hint=f"Choose one of {', '.join(self)}.")
        if name not in self._loaded:
            module, _, attribute = self._built_in[name].place.partition(":")
            implementation: Any = getattr(import_module(module), attribute)
            self._loaded[name] = implementation()
        return self._loaded[name]

    def values(self) -> list[T]:
        """All implementations, built-in ones first."""
        return [self[name] for name in self]

    def register(self, implementation: T) -> Undo:
        """Add an implementation for this process; the undo removes it."""
        name = implementation.name
        if name in self:
            raise PlanError(f"Two implementations of {self.contract} have the name {name!r}", hint="Rename one.")
        self._loaded[name] = implementation
        return Undo(lambda: self._loaded.pop(name, None))
