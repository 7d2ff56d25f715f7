"""Undo changes: alone, or with the step to run until then."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from lowtide.workload import Workload


class Undo:
    """Reverts changes, last one first; a second call does nothing. Also a context manager.

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
        """Add an action that runs before all earlier ones."""
        self._stack.callback(action)

    def keep(self) -> Undo:
        """Move the actions to a new undo, so that leaving this one's ``with`` block reverts nothing."""
        moved = Undo()
        moved._stack = self._stack.pop_all()
        return moved

    def __call__(self) -> None:
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self()


class Applied(Undo):
    """An undo that also has the step to run until it is called.

    A change inside the model keeps the workload. A change to the step has another workload over the same model: with
    another loss, autocast or optimizer. ``pause`` frees memory that the step holds between its runs, for something else
    that runs the model.
    """

    def __init__(
        self, work: Workload, *actions: Callable[[], object], pause: Callable[[], object] = lambda: None
    ) -> None:
        super().__init__(*actions)
        self.work, self.pause = work, pause
