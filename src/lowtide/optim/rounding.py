"""16-bit weights without a float32 copy: the step is computed in float32 and rounded so that nothing is lost."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from lowtide.errors import LowtideError
from lowtide.kernels.adamw8bit import random_bits
from lowtide.kernels.reference.adamw8bit import round_by
from lowtide.optim.exact import load_exactly
from lowtide.optim.hooks import StepPart, take_part
from lowtide.optim.single import SingleStep
from lowtide.techniques.technique import Undo

How = Literal["stochastic", "kahan"]


def round_updates(optimizer: torch.optim.Optimizer, how: How = "stochastic", *, seed: int = 0) -> Undo:
    """Step 16-bit weights in float32, a parameter at a time, with the optimizer's own code and float32 states.

    A small update of a bfloat16 weight is lost when the sum is rounded to nearest. ``"stochastic"`` rounds up or down
    at random, right on average (bfloat16 alone); ``"kahan"`` keeps what was rounded away in a second 16-bit tensor.
    Weights in float32 are stepped as they were. A run that is saved and resumed rounds as one that went on.

    >>> weight = torch.nn.Parameter(torch.ones(1000, dtype=torch.bfloat16))
    >>> optimizer = torch.optim.SGD([weight], lr=1e-3)
    >>> weight.grad = torch.ones_like(weight)
    >>> with round_updates(optimizer):
    ...     optimizer.step()
    >>> weight.unique().tolist()
    [0.99609375, 1.0]
    """
    if how not in ("stochastic", "kahan"):
        raise LowtideError(f"Updates cannot be rounded by {how!r}", hint='Pass "stochastic" or "kahan".')
    dtypes = {p.dtype for group in optimizer.param_groups for p in group["params"]}
    if how == "stochastic" and torch.float16 in dtypes:
        raise LowtideError("Stochastic rounding is for bfloat16 weights", hint='Pass "kahan" for float16.')
    undo = take_part(optimizer, _Rounded(optimizer, how, seed))
    undo.add(load_exactly(optimizer))
    for state in optimizer.state.values():
        state.update({key: value.float() for key, value in state.items() if _is_short(value)})
    return undo


def round_stochastically(x: Tensor, *, seed: int) -> Tensor:
    """float32 to bfloat16, up or down at random, to either side as often as it is near: right on average."""
    return round_by(x, random_bits(x, seed))


class _Rounded(StepPart):
    """Steps a float32 copy of one parameter after the other."""

    def __init__(self, optimizer: torch.optim.Optimizer, how: How, seed: int) -> None:
        super().__init__(optimizer)
        self.how = how
        self.seed = seed

    def __str__(self) -> str:
        return f"{self.how} rounding"

    def takes(self, parameter: Tensor) -> bool:
        return parameter.dtype in (torch.bfloat16, torch.float16)

    def run(self, single: SingleStep, parameters: list[Tensor]) -> None:
        numbers = {p: i for i, p in enumerate(p for g in single.optimizer.param_groups for p in g["params"])}
        for parameter in parameters:
            state = single.optimizer.state[parameter]
            gradient = parameter.grad
            assert gradient is not None
            wide = parameter.float()
            if (rest := state.get("rounded_away")) is not None:
                wide += rest
            wide.grad = gradient.float()
            single(parameter, instead=wide)
            wide.grad = None
            count = state["roundings"] = int(state.get("roundings", 0)) + 1
            if self.how == "stochastic":
                seed = (self.seed * 2654435761 + count * 97003 + numbers[parameter] * 40503) % 2**31
                parameter.copy_(round_stochastically(wide, seed=seed))
            else:
                parameter.copy_(wide)
                state["rounded_away"] = (wide - parameter.float()).to(parameter.dtype)


def _is_short(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16) and value.ndim > 0
