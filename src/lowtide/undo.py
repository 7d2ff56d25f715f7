"""Take changes back: an undo, and an undo that carries the step to run meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from lowtide.workload import Workload


class Undo:
    """Takes back what was done, last thing first; a second call does nothing. Works as a context manager too.

    >>> undo = Undo(lambda: print("restored"))
    >>> undo()
    restored
    >>> undo()
    """

    def __init__(self, *actions: Callable[[], object]) -> None:
        self._stack = ExitStack()
        for action in actions:
            self.add(action)

    def add(self, action: Callable[[], object]) -> None:
        """Have this taken back too, before all that was added earlier."""
        self._stack.callback(action)

    def keep(self) -> Undo:
        """Hand the actions on, so that leaving this undo's ``with`` block takes nothing back."""
        kept = Undo()
        kept._stack = self._stack.pop_all()
        return kept

    def __call__(self) -> None:
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self()


class Applied(Undo):
    """An undo that also has the step to run until it is called.

    What acts inside the model gives back the workload it was given; what acts on the step gives another one over the
    same model: with another loss around the first, another autocast or another optimizer.
    """

    def __init__(self, work: Workload, *actions: Callable[[], object]) -> None:
        super().__init__(*actions)
        self.work = work
