"""Saving and resuming without a change of dtype: torch casts a state to its parameter's dtype when it loads it."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import Tensor

from lowtide.techniques.technique import Undo


def load_exactly(optimizer: torch.optim.Optimizer) -> Undo:
    """Have ``load_state_dict`` keep the dtypes and the devices that states were saved with, codes among them.

    A state that was on the host stays there; one that was on a device goes to its parameter's.
    """
    seen: list[dict[str, Any]] = []

    def before(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        seen.append(state_dict)

    def after(optimizer: torch.optim.Optimizer) -> None:
        put_back(optimizer, seen.pop())

    handles = (
        optimizer.register_load_state_dict_pre_hook(before),
        optimizer.register_load_state_dict_post_hook(after),
    )
    return Undo(*(handle.remove for handle in handles))


def put_back(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Set the tensors of a loaded state to what was saved."""
    numbers = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for number, parameter in zip(numbers, parameters, strict=True):
        for key, value in state_dict["state"].get(number, {}).items():
            if isinstance(value, Tensor):
                stays = value.device.type == "cpu" and (value.ndim == 0 or value.is_pinned())
                optimizer.state[parameter][key] = value.clone() if stays else value.to(parameter.device, copy=True)
