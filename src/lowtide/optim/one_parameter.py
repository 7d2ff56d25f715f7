"""A step of one parameter of any torch optimizer, as the optimizer's own step would do it."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lowtide.compat.optimizers import remove_step_hooks
from lowtide.errors import LowtideError

PLAIN_STATES = "_lowtide_plain_states"  # of an optimizer: what its states were, until its first step
_KNOWN = ("torch.optim.", "lowtide.optim.", "torchao.", "bitsandbytes.")  # whose steps need no trial
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


def refuse_joint_step(optimizer: torch.optim.Optimizer) -> None:
    """Raise where a step of each parameter alone is another step than one of all, as with a common norm of gradients.

    Steps of unknown packages are tried on a few numbers in place of each parameter.
    """
    step, own = type(optimizer).step, optimizer.step  # a scheduler's own has the module of the class's
    if own.__module__ == step.__module__ and (step.__module__.startswith(_KNOWN) or _steps_alone(optimizer)):
        return
    raise LowtideError(
        f"{type(optimizer).__name__}.step gives other numbers where it steps one parameter at a time",
        hint="Use an optimizer that looks at each parameter by itself.",
    )


def _steps_alone(optimizer: torch.optim.Optimizer) -> bool:
    gradients = [(p, p.grad) for p in parameters_in(optimizer)]
    for parameter, _ in gradients:
        parameter.grad = None  # a step of others inside would find it
    try:
        together, alone = _try_steps(optimizer, one_by_one=False), _try_steps(optimizer, one_by_one=True)
    except Exception:  # a step that cannot be tried is not known to be one
        return False
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
    return all(torch.equal(a, b) and bool((a != 1).any()) for a, b in zip(together, alone, strict=True))


def _try_steps(optimizer: torch.optim.Optimizer, *, one_by_one: bool) -> list[Tensor]:
    """Two steps from an empty state, of numbers whose gradients differ in size. The optimizer does not change."""
    parameters = parameters_in(optimizer)
    device = parameters[0].device if parameters[0].device.type == "cuda" else "cpu"
    shadow = _shadow(optimizer)
    own = {key: value for key, value in vars(shadow).items() if key not in ("param_groups", "state")}
    memo: dict[int, Any] = {id(each): each for each in (optimizer, *parameters)}
    shadow.__dict__.update(copy.deepcopy(own, memo), state=defaultdict(dict))
    small: list[tuple[int, Tensor]] = []
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"][:2]:
            ones = torch.ones([2] * parameter.dim(), dtype=parameter.dtype, device=device, requires_grad=True)
            ones.grad = ones.detach() * 100.0 ** (-1) ** len(small)
            small.append((index, ones))
    turns: Iterable[list[tuple[int, Tensor]]] = [[each] for each in small] if one_by_one else [small]
    with torch.random.fork_rng([device] if device != "cpu" else []):
        for turn in [*turns] * 2:
            mine = {place: [each for at, each in turn if at == place] for place, _ in turn}
            shadow.param_groups = [{**optimizer.param_groups[at], "params": mine[at]} for at in mine]
            shadow.step()
    return [each for _, each in small]


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
