"""The global generators of Python and numpy, which a model may draw from beside torch's."""

from __future__ import annotations

import ctypes
import random
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class HostGenerators:
    """Their states at one time."""

    python: Any
    numpy: Any

    @staticmethod
    def now() -> HostGenerators:
        """Copy the states: some 20 µs."""
        return HostGenerators(random.getstate(), _numpy_state())

    def drawn_since(self) -> bool:
        """Whether anything may have been drawn after these states were copied."""
        now = HostGenerators.now()
        return self.numpy is not now.numpy or self.python != now.python

    def restore(self) -> None:
        """Have the generators draw the same again."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)


_last_numpy: tuple[bytes, Any] = b"", None


def _numpy_state() -> Any:
    """The state of numpy's generator: the same object again while nothing is drawn.

    numpy takes 80 µs to copy it, so its bits are looked at first, as they lie in memory. They tell of every draw, but
    for a normal number that waits since it was drawn together with the last one.
    """
    global _last_numpy
    generator = vars(np.random)["get_bit_generator"]()
    is_known = type(generator) is np.random.MT19937  # the one that numpy starts with: 624 words and a position
    bits = ctypes.string_at(generator.ctypes.state_address, 2500) if is_known else b""
    known, state = _last_numpy
    if not bits or bits != known or state["has_gauss"]:
        state = np.random.get_state(legacy=False)
        _last_numpy = bits, state
    return state
