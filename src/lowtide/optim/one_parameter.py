"""A step of one parameter of any torch optimizer, as the optimizer's own step would do it."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from lowtide.compat.optimizers import remove_step_hooks

PLAIN_STATES = "_lowtide_plain_states"  # of an optimizer: what its states were, until its first step
FIRST = "first_number"  # in a group of one parameter alone: the parameter's number in the whole optimizer


class SingleStep:
    """Steps one parameter at a time, with the optimizer's own code, its current numbers and its own state.

    Elementwise optimizers (all of torch's but LBFGS, and Muon's for a matrix) give the same bits as a step of all.
    The optimizer's state afterwards is that of a plain step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._shadow = _shadow(optimizer)
        self._places = _places(optimizer)

    def __call__(self, parameter: Tensor, *, instead: Tensor | None = None) -> None:
        """Step ``parameter`` by its ``grad``; or step ``instead``, with its own grad, in the parameter's place."""
        optimizer = self.optimizer
        if type(self._shadow) is not type(optimizer):  # its states were lowered since
            self._shadow = _shadow(optimizer)
        shadow = self._shadow
        if parameter not in self._places:  # a group was added since
            self._places = _places(optimizer)
        index, number = self._places[parameter]
        vars(optimizer).pop(PLAIN_STATES, None)
        stepped = parameter if instead is None else instead
        shadow.param_groups = [{**optimizer.param_groups[index], "params": [stepped], FIRST: number}]
        if instead is None:
            shadow.state = optimizer.state
        else:
            shadow.state = defaultdict(dict, {instead: optimizer.state[parameter]})
        shadow.step()
        shadow.param_groups, shadow.state = [], optimizer.state  # else the last copy would live until the next step


def parameters_in(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """List an optimizer's parameters, group after group."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def _places(optimizer: torch.optim.Optimizer) -> dict[Tensor, tuple[int, int]]:
    """The number of each parameter's group, and its own."""
    pairs = ((p, index) for index, group in enumerate(optimizer.param_groups) for p in group["params"])
    return {p: (index, number) for number, (p, index) in enumerate(pairs)}


def _shadow(optimizer: torch.optim.Optimizer) -> Any:
    """A copy that shares the state; nobody's hooks, and no scheduler's counter, see its steps."""
    shadow = copy.copy(optimizer)
    shadow.__dict__ = dict(optimizer.__dict__)
    shadow.__dict__.pop("step", None)
    remove_step_hooks(shadow)
    return shadow
