"""Optimizer states that take less of the device: in 8 bits, in 4, or on the host."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor

from lowtide.errors import LowtideError
from lowtide.optim.adamw8bit import AdamW8bit, lowered, raised
from lowtide.optim.bridges import Adam4bit
from lowtide.optim.offload import offload_state
from lowtide.optim.single import PLAIN_STATES
from lowtide.techniques.technique import Undo

KINDS = ("8bit", "4bit", "cpu")
_State = dict[str, Any]


def lower_state(optimizer: torch.optim.Optimizer, state: str) -> Undo:
    """Keep the optimizer's state in less memory, from now on; the undo gives it back as torch keeps it.

    ``"8bit"``: torch's Adam and AdamW with moments in 8 bits (``AdamW8bit``). ``"4bit"``: AdamW with moments in 4, by
    torchao. ``"cpu"``: any optimizer, its state in pinned memory of the host, copied to the device a parameter at a
    time; the same bits as without.

    The optimizer stays the object that it was, with the same groups: loops and schedulers go on using it. What state
    there is, is converted.
    """
    if state not in KINDS:
        raise LowtideError(f"There is no optimizer state {state!r}", hint=f"Pass one of: {', '.join(KINDS)}.")
    if state == "cpu":
        return offload_state(optimizer)
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW) or optimizer.defaults.get("amsgrad"):
        raise LowtideError(
            f"{type(optimizer).__name__} has no states in {state}",
            hint='They are for torch.optim.Adam and AdamW without amsgrad; "cpu" is for any optimizer.',
        )
    fused = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
    decoupled = isinstance(optimizer, torch.optim.AdamW)
    if state == "4bit":
        four = Adam4bit(decoupled=decoupled)
        undo = _convert(optimizer, four.optimizer, four.lowered, partial(four.raised, fused=fused))
        undo.add(four.rates_as_tensors(optimizer))
        return undo
    other = AdamW8bit([torch.empty(0)], decoupled_weight_decay=decoupled)
    return _convert(optimizer, other, lowered, partial(raised, fused=fused))


def _convert(
    optimizer: torch.optim.Optimizer,
    other: torch.optim.Optimizer,
    lower: Callable[[Tensor, _State], _State],
    lift: Callable[[Tensor, _State], _State],
) -> Undo:
    """Make the optimizer one of other's class, its groups as they are with what they lack, its states lowered."""
    groups = [set(group) for group in optimizer.param_groups]
    plain = {p: dict(state) for p, state in optimizer.state.items()}
    states = {p: lower(p, state) for p, state in plain.items()}
    other.defaults.update({key: value for key, value in optimizer.defaults.items() if key in other.defaults})
    undo = become(optimizer, other)
    for group in optimizer.param_groups:
        for key, value in other.defaults.items():
            group.setdefault(key, value)
    replace_states(optimizer, states)
    # Until the first step, on the host: a plan that is tried and taken back leaves the states bit for bit.
    vars(optimizer)[PLAIN_STATES] = {p: _to_host(state) for p, state in plain.items()}

    def restore() -> None:
        plain = vars(optimizer).pop(PLAIN_STATES, None)
        if plain is not None:
            states = {p: _from_host(state) for p, state in plain.items()}
        else:
            states = {p: lift(p, state) for p, state in optimizer.state.items()}
        undo()
        for group, before in zip(optimizer.param_groups, groups, strict=False):
            for key in [key for key in group if key not in before]:
                del group[key]
        replace_states(optimizer, states)

    return Undo(restore)


def _to_host(state: dict[str, Any]) -> dict[str, Any]:
    return {key: (value.device, value.cpu()) if isinstance(value, Tensor) else value for key, value in state.items()}


def _from_host(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value[1].to(value[0]) if isinstance(value, tuple) else value for key, value in state.items()}


def replace_states(optimizer: torch.optim.Optimizer, states: dict[Tensor, dict[str, Any]]) -> None:
    """Give the optimizer these states; of what it had, nothing stays."""
    optimizer.state.clear()
    optimizer.state.update({p: state for p, state in states.items() if state})


def become(optimizer: Any, other: torch.optim.Optimizer) -> Undo:
    """Make an optimizer one of another class in place: its identity, groups, state and hooks stay, the rest is other's.

    A scheduler wraps the step that it finds on the object; that of the new class takes its place.
    """
    kind, before = type(optimizer), dict(vars(optimizer))
    kept = {key: value for key, value in before.items() if key in ("param_groups", "state") or "hooks" in key}
    marks = {key: value for key, value in before.items() if key.startswith("_opt_called")}
    optimizer.__class__ = type(other)
    optimizer.__dict__.update({**vars(other), **kept, **marks})
    optimizer._patch_step_function()
    optimizer.__dict__.update(kept)
    if "step" in before:
        optimizer.__dict__["step"] = _counted(optimizer, type(other).step)

    def restore() -> None:
        now = {key: vars(optimizer)[key] for key in (*kept, "_opt_called") if key in vars(optimizer)}
        optimizer.__class__ = kind
        optimizer.__dict__.clear()
        optimizer.__dict__.update({**before, **now})

    return Undo(restore)


def _counted(optimizer: Any, step: Callable[..., Any]) -> Callable[..., Any]:
    """The step as a learning-rate scheduler wraps it: it wants to know that a step came before its own."""

    @wraps(step)
    def counted(*args: Any, **kwargs: Any) -> Any:
        optimizer._opt_called = True
        return step(optimizer, *args, **kwargs)

    vars(counted)["_wrapped_by_lr_sched"] = True
    return counted
