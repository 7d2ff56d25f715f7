"""Restoring state after a step, whatever goes wrong on the way."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Self

from lowtide.errors import RestoreError

_ATTEMPTS = 3
_NAMED = 5  # in an error; there may be hundreds


class Restoring:
    """Run restorations at the end, last first. An error in one skips no other.

    Each restoration must give the same result when it is started again: one that fails is tried three times. An
    interrupt waits until all is restored. ``RestoreError`` names whatever could not be.
    """

    def __init__(self) -> None:
        self._left: list[tuple[str, Callable[[], object]]] = []
        self._failed: list[tuple[str, BaseException]] = []
        self._interrupt: BaseException | None = None

    def add(self, what: str, restore: Callable[..., object], *args: Any) -> None:
        """Call ``restore(*args)`` at the end; ``what`` names the state in an error."""
        self._left.append((what, lambda: restore(*args)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            self.close()
        except BaseException:
            self.close()  # an interrupt can come before it is made to wait
            raise

    def close(self) -> None:
        """Run the remaining restorations."""
        with _interrupts_wait():
            while self._left:
                self._attempt(*self._left[-1])
                self._left.pop()
        failed, interrupt = self._failed, self._interrupt
        self._failed, self._interrupt = [], None
        if failed:
            named = [what for what, _ in failed]
            more = f" and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
            error = failed[0][1]
            raise RestoreError(
                f"Not restored after a step: {', '.join(named[:_NAMED])}{more} ({type(error).__name__}: {error})",
                hint="Load them from a checkpoint before training on.",
            ) from error
        if interrupt is not None:
            raise interrupt

    def _attempt(self, what: str, restore: Callable[[], object]) -> None:
        error: BaseException | None = None
        for _ in range(_ATTEMPTS):
            try:
                restore()
            except Exception as problem:
                error = problem
            except BaseException as problem:
                error = self._interrupt = problem
            else:
                return
        if error is not None:
            self._failed.append((what, error))


@contextmanager
def _interrupts_wait() -> Generator[None]:
    """Hold a Ctrl-C back until the end; only the main thread gets one."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    waiting: list[tuple[Any, ...]] = []
    try:
        signal.signal(signal.SIGINT, lambda *args: waiting.append(args))
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if waiting:
            before(*waiting[0])
