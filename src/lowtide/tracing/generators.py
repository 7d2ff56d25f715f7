"""Random numbers from other generators than torch's default ones, which recomputation restores."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from lowtide.compat.tensors import generator_id


def has_own_generator(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an op has a generator argument other than torch's default ones."""
    given: list[Any] = [value for value in (*args, *kwargs.values()) if type(value) is torch.Generator]
    if not given:
        return False
    defaults: list[Any] = [torch.default_generator, *torch.cuda.default_generators]
    return not set(map(generator_id, defaults)).issuperset(map(generator_id, given))


def host_states() -> tuple[Any, ...]:
    """The states of Python's and of numpy's generator."""
    held: Any = np.random.get_state(legacy=False)
    return random.getstate(), held["state"]["key"].tobytes(), held["state"]["pos"], held["has_gauss"]
