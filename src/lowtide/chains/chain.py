"""A chain of stages: what each takes and makes, in seconds and bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

from lowtide.errors import LowtideError


@dataclass(frozen=True, slots=True)
class Chain:
    """n stages that run one after the other, each on what the one before made. All arrays are per stage.

    Stage i turns value i into value i + 1, so there are n + 1 values: value 0 comes from outside and stays until
    the end, value n goes out, to the loss or to what follows. A loss that is a stage is the last one. In
    backward, stage i turns the gradient of value i + 1 into that of value i; the gradient of value n is there
    when the first backward runs.

    ``saved_bytes[i]`` (Rotor's ā) is what a forward of stage i adds when it keeps everything: all that its backward
    reads except value i, and value i + 1 itself, whether or not that backward reads it. It is thus never less than
    ``value_bytes[i + 1]``; what is shared with value i is not in it. A gradient is as large as its value unless said
    otherwise (0 for an input of integers).

    Temporaries are what a stage holds beyond its inputs and results while it runs; in backward that may be less than
    nothing, if what is saved goes before the gradient is whole. ``passing_temporary_bytes`` are those of a forward that
    keeps nothing, if not the same. ``left_bytes`` stay when a stage's backward is done: gradients of its parameters.

    ``tail_seconds`` is the end of a stage's forward, after the last that its backward reads. Stages that run again stop
    there: the last of them leaves its tail out.

    A stage may be kept lightly: without what is cheap to make again of the rest. It then saves ``light_bytes[i]``, and
    its backward takes ``light_seconds[i]`` longer and holds ``light_temporary_bytes[i]``.

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
        given = {field.name: list(getattr(self, field.name)) for field in fields(self)}
        for name in (
            "forward_temporary_bytes",
            "backward_temporary_bytes",
            "tail_seconds",
            "light_seconds",
            "left_bytes",
        ):
            given[name] = given[name] or [0] * stages
        given["gradient_bytes"] = given["gradient_bytes"] or given["value_bytes"]
        given["light_bytes"] = given["light_bytes"] or given["saved_bytes"]
        given["passing_temporary_bytes"] = given["passing_temporary_bytes"] or given["forward_temporary_bytes"]
        given["light_temporary_bytes"] = given["light_temporary_bytes"] or given["backward_temporary_bytes"]
        for name, numbers in given.items():
            wanted = stages + (name in ("value_bytes", "gradient_bytes"))
            if len(numbers) != wanted:
                raise LowtideError(f"{name} of a chain of {stages} stages has {wanted} numbers, not {len(numbers)}")
            object.__setattr__(self, name, _checked(name, numbers))
        for name in ("saved_bytes", "light_bytes"):
            for i, (saved, output) in enumerate(zip(getattr(self, name), self.value_bytes[1:], strict=True)):
                if saved < output:
                    raise LowtideError(
                        f"{name}[{i}] is {saved}, less than the stage's output of {output} bytes",
                        hint="What a stage saves includes its output.",
                    )
        for i, (tail, forward) in enumerate(zip(self.tail_seconds, self.forward_seconds, strict=True)):
            if tail > forward:
                raise LowtideError(f"tail_seconds[{i}] is {tail}, more than the {forward} of the stage's forward")

    @property
    def stages(self) -> int:
        """How many there are."""
        return len(self.forward_seconds)

    @classmethod
    def uniform(cls, stages: int, *, value_bytes: int = 1, saved_bytes: int = 1, backward_seconds: float = 1) -> Chain:
        """Equal stages of one second forward.

        >>> Chain.uniform(3, saved_bytes=2).saved_bytes
        (2, 2, 2)
        """
        return cls([1.0] * stages, [backward_seconds] * stages, [value_bytes] * (stages + 1), [saved_bytes] * stages)


def _checked(name: str, numbers: Sequence[float]) -> tuple[float, ...]:
    """Finite; bytes whole; not negative, but for what backward holds."""
    whole = name.endswith("bytes")
    least = -math.inf if name in ("backward_temporary_bytes", "light_temporary_bytes") else 0
    for i, number in enumerate(numbers):
        if not (math.isfinite(number) and number >= least and (not whole or number == int(number))):
            kind = "a whole number of bytes" if whole else "a number of seconds"
            raise LowtideError(f"{name}[{i}] is {number}, not {kind}")
    return tuple(int(number) if whole else float(number) for number in numbers)
