"""Random numbers from generators that recomputation does not restore, and generator states that checkpoints keep."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from lowtide.compat.tensors import generator_id
from lowtide.tracing.graph import Op


def has_own_generator(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether an op has a generator argument other than torch's default ones."""
    given: list[Any] = [value for value in (*args, *kwargs.values()) if type(value) is torch.Generator]
    if not given:
        return False
    defaults: list[Any] = [torch.default_generator, *torch.cuda.default_generators]
    return not set(map(generator_id, defaults)).issuperset(map(generator_id, given))


class HostDraws:
    """Marks forward ops of modules that draw from Python's or numpy's generator."""

    def __init__(self, ops: list[Op]) -> None:
        self._ops = ops
        self._module: str | None = None  # of the last forward op
        self._states = _host_states()

    def start(self) -> None:
        """Ignore numbers that were drawn before."""
        self._states = _host_states()

    def enter(self, module: str) -> bool:
        """Note a forward op of a module. Tell whether numbers were drawn since the last one of another module."""
        if module == self._module:
            return False
        drew = self.settle()
        self._module = module
        return drew

    def settle(self) -> bool:
        """Mark the last module's ops if numbers were drawn since the generators were read last."""
        before, self._states = self._states, _host_states()
        if self._states == before:
            return False
        for index, op in reversed(list(enumerate(self._ops))):
            if op.phase != "forward" or op.module != self._module:
                break
            self._ops[index] = replace(op, own_generator=True)
        return True


def _host_states() -> tuple[Any, ...]:
    numpys: Any = np.random.get_state(legacy=False)
    return random.getstate(), numpys["state"]["key"].tobytes(), numpys["state"]["pos"], numpys["has_gauss"]


def watch_generator_states(note: Callable[[Tensor, str], Tensor]) -> AbstractContextManager[Any]:
    """Count generator states that checkpoints keep: no op makes them, so their getter is watched in this block."""
    read = torch.get_rng_state

    def get_rng_state() -> Tensor:
        return note(read(), "generator state")

    return mock.patch.object(torch, "get_rng_state", get_rng_state)
