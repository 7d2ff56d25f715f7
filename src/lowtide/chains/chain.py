"""A chain of stages, with their seconds and bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

from lowtide.errors import LowtideError

_DEFAULTS = {  # an array that is left out equals another one, or is zero
    "gradient_bytes": "value_bytes",
    "light_bytes": "saved_bytes",
    "passing_temporary_bytes": "forward_temporary_bytes",
    "light_temporary_bytes": "backward_temporary_bytes",
}


@dataclass(frozen=True, slots=True)
class Chain:
    """n stages that run one after the other. All arrays are per stage.

    Stage i turns value i into value i + 1, so there are n + 1 values. Value 0 comes from outside and stays until the
    end. Value n goes to the loss, unless the loss is the last stage. In backward, stage i turns the gradient of
    value i + 1 into that of value i. The gradient of value n exists when the first backward runs.

    | array | meaning |
    |---|---|
    | ``saved_bytes`` | Rotor's ā: added by a forward that keeps everything, output included, input excluded |
    | ``gradient_bytes`` | of each value; as large as the value by default, 0 for an input of integers |
    | ``…_temporary_bytes`` | beside inputs and results while a stage runs; negative if backward frees early |
    | ``passing_temporary_bytes`` | those of a forward that keeps nothing; as in forward by default |
    | ``left_bytes`` | stay after a stage's backward: gradients of its parameters |
    | ``tail_seconds`` | end of a forward, after the last op whose result backward reads; recomputing may skip it |
    | ``light_…`` | of a stage kept lightly, without its cheap results, which its backward recomputes |

    >>> Chain([1, 1], [2, 2], [4, 4, 1], [6, 3]).stages
    2
    """

    forward_seconds: Sequence[float]
    backward_seconds: Sequence[float]
    value_bytes: Sequence[int]
    saved_bytes: Sequence[int]
    forward_temporary_bytes: Sequence[int] = ()
    backward_temporary_bytes: Sequence[int] = ()
    gradient_bytes: Sequence[int] = ()
    tail_seconds: Sequence[float] = ()
    light_bytes: Sequence[int] = ()
    light_seconds: Sequence[float] = ()
    light_temporary_bytes: Sequence[int] = ()
    passing_temporary_bytes: Sequence[int] = ()
    left_bytes: Sequence[int] = ()

    def __post_init__(self) -> None:
        stages = len(self.forward_seconds)
        if not stages:
            raise LowtideError("A chain has at least one stage, this one has none")
        arrays = {field.name: list(getattr(self, field.name)) for field in fields(self)}
        for name in list(arrays)[4:]:
            arrays[name] = arrays[name] or arrays.get(_DEFAULTS.get(name, ""), [0] * stages)
        for name, numbers in arrays.items():
            wanted = stages + (name in ("value_bytes", "gradient_bytes"))
            if len(numbers) != wanted:
                raise LowtideError(f"{name} of a chain of {stages} stages has {wanted} numbers, not {len(numbers)}")
            object.__setattr__(self, name, _checked(name, numbers))
        for name in ("saved_bytes", "light_bytes"):
            for i, (saved, output) in enumerate(zip(getattr(self, name), self.value_bytes[1:], strict=True)):
                if saved < output:
                    raise LowtideError(
                        f"{name}[{i}] is {saved}, less than the stage's output of {output} bytes",
                        hint="A stage's saved bytes include its output.",
                    )
        for i, (tail, forward) in enumerate(zip(self.tail_seconds, self.forward_seconds, strict=True)):
            if tail > forward:
                raise LowtideError(f"tail_seconds[{i}] is {tail}, more than the {forward} of the stage's forward")

    @property
    def stages(self) -> int:
        return len(self.forward_seconds)

    @classmethod
    def uniform(cls, stages: int, *, value_bytes: int = 1, saved_bytes: int = 1, backward_seconds: float = 1) -> Chain:
        """Equal stages of one second forward.

        >>> Chain.uniform(3, saved_bytes=2).saved_bytes
        (2, 2, 2)
        """
        return cls([1.0] * stages, [backward_seconds] * stages, [value_bytes] * (stages + 1), [saved_bytes] * stages)


def _checked(name: str, numbers: Sequence[float]) -> tuple[float, ...]:
    """Check that numbers are finite, bytes whole, and none negative but temporaries of backward."""
    whole = name.endswith("bytes")
    least = -math.inf if name in ("backward_temporary_bytes", "light_temporary_bytes") else 0
    for i, number in enumerate(numbers):
        if not (math.isfinite(number) and number >= least and (not whole or number == int(number))):
            kind = "a whole number of bytes" if whole else "a number of seconds"
            raise LowtideError(f"{name}[{i}] is {number}, not {kind}")
    return tuple(int(number) if whole else float(number) for number in numbers)
