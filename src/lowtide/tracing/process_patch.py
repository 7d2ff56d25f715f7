"""Changes to torch that every thread of the process sees, for as long as somebody needs them."""

from __future__ import annotations

import threading
from collections.abc import Callable


class ProcessPatch:
    """A context manager: the first who enters makes the change, the last who leaves restores torch.

    ``change`` returns the function that restores.
    """

    def __init__(self, change: Callable[[], Callable[[], None]]) -> None:
        self._change = change
        self._lock = threading.Lock()
        self._users = 0
        self._restore: Callable[[], None] = lambda: None

    def __enter__(self) -> None:
        with self._lock:
            if not self._users:
                self._restore = self._change()
            self._users += 1

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                self._restore()
