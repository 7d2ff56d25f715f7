"""16-bit weights without a float32 copy: the step is computed in float32 and rounded so that nothing is lost."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from lowtide.errors import LowtideError
from lowtide.kernels.adamw8bit import random_bits
from lowtide.kernels.reference.adamw8bit import round_by
from lowtide.optim.hooks import StepPart, take_part
from lowtide.optim.one_parameter import SingleStep, parameters_in
from lowtide.optim.state_dict import as_saved, keeps_parameter_dtype, load_exactly
from lowtide.undo import Undo

How = Literal["stochastic", "kahan"]
ROUNDINGS: tuple[How, ...] = ("stochastic", "kahan")

_SHORT = (torch.bfloat16, torch.float16)
COUNT, REST = "roundings", "rounded_away"  # in a parameter's state, and so in what is saved


def round_updates(optimizer: torch.optim.Optimizer, how: How = "stochastic", *, seed: int = 0) -> Undo:
    """Step 16-bit weights in float32, a parameter at a time, with the optimizer's own code and float32 states.

    A small update of a bfloat16 weight is lost when the sum is rounded to nearest. ``"stochastic"`` rounds up or down
    at random, right on average (bfloat16 alone); ``"kahan"`` keeps the rounding error in a second 16-bit tensor.
    float32 weights are stepped as before. A resumed run rounds like an uninterrupted one, and states saved without
    rounding load too. The undo leaves states as a plain step expects them.

    >>> weight = torch.nn.Parameter(torch.ones(1000, dtype=torch.bfloat16))
    >>> optimizer = torch.optim.SGD([weight], lr=1e-3)
    >>> weight.grad = torch.ones_like(weight)
    >>> with round_updates(optimizer):
    ...     optimizer.step()
    >>> weight.unique().tolist()
    [0.99609375, 1.0]
    """
    if how not in ROUNDINGS:
        raise LowtideError(f"Updates cannot be rounded by {how!r}", hint='Pass "stochastic" or "kahan".')
    dtypes = {p.dtype for p in parameters_in(optimizer)}
    if how == "stochastic" and torch.float16 in dtypes:
        raise LowtideError("Stochastic rounding is for bfloat16 weights", hint='Pass "kahan" for float16.')
    undo = take_part(optimizer, _Rounded(optimizer, how, seed))
    undo.add(load_exactly(optimizer, lambda p, state, group: _widened(as_saved(p, state, group))))
    for state in optimizer.state.values():
        _widened(state)

    def restore() -> None:
        undo()
        _give_back(optimizer)

    return Undo(restore)


def round_stochastically(x: Tensor, *, seed: int) -> Tensor:
    """Round float32 to bfloat16, up or down at random, by the distance to either side: right on average."""
    return round_by(x, random_bits(x, seed))


def step_seed(seed: int, count: int) -> int:
    """Return a seed for the roundings of a step, from an optimizer's and the steps so far."""
    return seed * 2654435761 + count * 97003


def with_notes(converted: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
    """Add the notes of rounding in a state to its converted form, unless that is empty."""
    return {**converted, **{key: state[key] for key in (COUNT, REST) if key in state}} if converted else {}


class _Rounded(StepPart):
    """Steps a float32 copy of one parameter after the other."""

    def __init__(self, optimizer: torch.optim.Optimizer, how: How, seed: int) -> None:
        super().__init__(optimizer)
        self.how = how
        self.seed = seed

    def __str__(self) -> str:
        return f"{self.how} rounding"

    def takes(self, parameter: Tensor) -> bool:
        return parameter.dtype in _SHORT

    def run(self, single: SingleStep, parameters: list[Tensor]) -> None:
        numbers = {p: i for i, p in enumerate(parameters_in(single.optimizer))}
        for parameter in parameters:
            state = _widened(single.optimizer.state[parameter])
            gradient = parameter.grad
            assert gradient is not None
            wide = parameter.float()
            if (rest := state.get(REST)) is not None:
                wide += rest
            wide.grad = gradient.float()
            single(parameter, instead=wide)
            wide.grad = None
            count = state[COUNT] = int(state.get(COUNT, 0)) + 1
            if self.how == "stochastic":
                seed = (step_seed(self.seed, count) + numbers[parameter] * 40503) % 2**31
                parameter.copy_(round_stochastically(wide, seed=seed))
            else:
                parameter.copy_(wide)
                state[REST] = (wide - parameter.float()).to(parameter.dtype)


def _widened(state: dict[str, Any]) -> dict[str, Any]:
    """The state with float32 where it had 16 bits, in place; what was rounded away stays short."""
    state.update({key: value.float() for key, value in state.items() if key != REST and _is_of(value, *_SHORT)})
    return state


def _give_back(optimizer: torch.optim.Optimizer) -> None:
    """Leave states as a plain step expects them. Weights that are float32 by now get back their rounding error."""
    short = keeps_parameter_dtype(optimizer)
    for parameter, state in list(optimizer.state.items()):
        state.pop(COUNT, None)
        rest = state.pop(REST, None)
        if rest is not None and parameter.dtype == torch.float32:
            parameter.data += rest
        if short and parameter.dtype == torch.float32:
            _widened(state)  # raised from 8 bits while the weights were short
        elif short and parameter.dtype in _SHORT:
            floats = {key: value for key, value in state.items() if _is_of(value, torch.float32)}
            state.update({key: value.to(parameter.dtype) for key, value in floats.items()})
        if not state:
            del optimizer.state[parameter]


def _is_of(value: Any, *dtypes: torch.dtype) -> bool:
    return isinstance(value, Tensor) and value.dtype in dtypes and value.ndim > 0
