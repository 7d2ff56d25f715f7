"""Saving and resuming without a change of dtype: torch casts a state to its parameter's dtype when it loads it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from lowtide.compat import pytree
from lowtide.compat.optimizers import load_pre_hooks
from lowtide.undo import Undo

State = dict[str, Any]
Receive = Callable[[Tensor, State, dict[str, Any]], State]


def as_saved(parameter: Tensor, state: State, group: dict[str, Any]) -> State:
    """A copy of a parameter's state in the dtypes that it was saved in, on the parameter's device.

    Scalars on the host, such as step counts, stay there, but for the counts of steps that run on the device alone.
    """
    on_device = group.get("fused") or group.get("capturable")

    def copied(key: str, value: Any) -> Any:
        if isinstance(value, Tensor) and value.ndim == 0 and not (key == "step" and on_device):
            return value.clone() if value.device.type == "cpu" else value.to(parameter.device, copy=True)
        return pytree.tree_map_only(Tensor, lambda t: t.to(parameter.device, copy=True), value)

    return {key: copied(key, value) for key, value in state.items()}


def load_exactly(optimizer: torch.optim.Optimizer, receive: Receive = as_saved) -> Undo:
    """Have ``load_state_dict`` give each parameter what ``receive(parameter, state, group)`` makes of its saved state.

    torch neither casts the states nor moves them: what is received on the host was never on the device. If it is
    called again, each ``receive`` gets the result of the one before. An error of theirs leaves the optimizer as it was.
    """
    loading = _loading_of(optimizer)
    if loading is None:
        loading = _Loading()
        loading.handles = (
            optimizer.register_load_state_dict_pre_hook(loading.before),
            optimizer.register_load_state_dict_post_hook(loading.after),
        )
    loading.receivers.append(receive)
    return Undo(lambda: loading.leave(receive))


def loads_exactly(optimizer: Any) -> bool:
    return _loading_of(optimizer) is not None


def keeps_parameter_dtype(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether states are in the dtypes of their parameters, as those of torch's own optimizers are."""
    bases = type(optimizer).__mro__
    return any(b.__module__.startswith("torch.optim.") and b is not torch.optim.Optimizer for b in bases)


def saved_parameters(
    optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]
) -> Iterator[tuple[Tensor, Any, dict[str, Any]]]:
    """Yield each parameter with its number and group in a saved state. torch raises later where there are others."""
    for group, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=False):
        for parameter, number in zip(group["params"], saved["params"], strict=False):
            yield parameter, number, saved


class _Loading:
    """Takes states out of what torch loads, and puts them where they belong when torch has loaded the groups."""

    def __init__(self) -> None:
        self.receivers: list[Receive] = []
        self.handles: tuple[Any, ...] = ()
        self.states: dict[Any, State] = {}

    def leave(self, receive: Receive) -> None:
        """Ask this one no more; without any, torch loads as it does."""
        self.receivers.remove(receive)
        for handle in self.handles if not self.receivers else ():
            handle.remove()

    def before(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        left = dict(state_dict["state"])
        self.states = {}
        for parameter, number, saved in saved_parameters(optimizer, state_dict):
            if number in left:
                state = left.pop(number)
                for receive in self.receivers:
                    state = receive(parameter, state, saved)
                self.states[parameter] = state
        self.states.update(deepcopy(left))  # of no parameter
        return {**state_dict, "state": {}}

    def after(self, optimizer: torch.optim.Optimizer) -> None:
        states, self.states = self.states, {}
        # torch's own door: it brings states of older versions up to date.
        optimizer.__setstate__({"state": defaultdict(dict, states), "param_groups": optimizer.param_groups})


def _loading_of(optimizer: Any) -> _Loading | None:
    for hook in load_pre_hooks(optimizer).values():
        if isinstance(owner := getattr(hook, "__self__", None), _Loading):
            return owner
    return None
