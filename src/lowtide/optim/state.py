"""Optimizer states that take less of the device: in 8 bits, in 4, or on the host."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from lowtide.compat.optimizers import AMP_SCALING, STEP_CALLED, call_hooks_in_step, mark_step, mark_wrapped
from lowtide.errors import LowtideError
from lowtide.optim.adamw8bit import AdamW8bit, lowered, raised
from lowtide.optim.bridges import Adam4bit, Bitsandbytes, has_bridge
from lowtide.optim.hooks import one_at_a_time, refuse_closure
from lowtide.optim.offload import is_offloaded, offload_state
from lowtide.optim.one_parameter import PLAIN_STATES
from lowtide.optim.rounding import with_notes
from lowtide.optim.state_dict import State, as_saved, load_exactly
from lowtide.undo import Undo

KINDS = ("8bit", "4bit", "cpu")


def lower_state(optimizer: torch.optim.Optimizer, state: str) -> Undo:
    """Keep the optimizer's state in less memory, from now on; the undo restores torch's form.

    ``"8bit"``: torch's Adam and AdamW with moments in 8 bits (``AdamW8bit``). Momentum SGD of torch, and optimizers of
    bitsandbytes such as Lion, LARS and LAMB, are stepped by bitsandbytes. ``"4bit"``: AdamW with moments in 4, by
    torchao. ``"cpu"``: any optimizer, its state in pinned memory of the host, copied to the device a parameter at a
    time; the same bits as without.

    The optimizer stays the object that it was, with the same groups: loops and schedulers go on using it. Its state is
    converted, and so is a plain one that is loaded later.
    """
    if state not in KINDS:
        raise LowtideError(f"There is no optimizer state {state!r}", hint=f"Pass one of: {', '.join(KINDS)}.")
    if (state == "4bit" and is_offloaded(optimizer)) or (state == "cpu" and hasattr(optimizer, "_subclass_zeros")):
        raise LowtideError("States in 4 bits cannot be on the host as well", hint='Take "8bit", or one of the two.')
    if state == "cpu":
        return offload_state(optimizer)
    if state == "8bit" and has_bridge(optimizer):
        eight = Bitsandbytes(optimizer)
        return convert(optimizer, eight.optimizer, eight.lowered, eight.raised)
    amsgrad = any(group.get("amsgrad") for group in (optimizer.defaults, *optimizer.param_groups))
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW) or amsgrad:
        raise LowtideError(
            f"{type(optimizer).__name__} has no states in {state}",
            hint='They are for torch.optim.Adam and AdamW without amsgrad, "8bit" for SGD too, "cpu" for all.',
        )
    decoupled = isinstance(optimizer, torch.optim.AdamW)
    if state == "4bit":
        four = Adam4bit(decoupled=decoupled)
        undo = convert(optimizer, four.optimizer, four.lowered, four.raised)
        undo.add(four.rates_as_tensors(optimizer))
        undo.add(_load_in_4bit(optimizer, four))
        return undo
    other = AdamW8bit([torch.empty(0)], decoupled_weight_decay=decoupled)
    return convert(optimizer, other, lowered, raised)


def convert(
    optimizer: torch.optim.Optimizer,
    other: torch.optim.Optimizer,
    lower: Callable[[Tensor, State], State],
    lift: Callable[[Tensor, State], State],
) -> Undo:
    """Change the optimizer's class to other's, lower its states, and add the settings that its groups lack."""
    groups, defaults = [set(group) for group in optimizer.param_groups], optimizer.defaults
    plain = {p: dict(state) for p, state in optimizer.state.items()}
    states = {p: with_notes(lower(p, state), state) for p, state in plain.items() if state}
    other.defaults.update({key: value for key, value in optimizer.defaults.items() if key in other.defaults})
    undo = become(optimizer, other)
    for group in optimizer.param_groups:
        for key, value in other.defaults.items():
            group.setdefault(key, value)
    replace_states(optimizer, states)
    # On the host until the first step: a plan that is tried and undone leaves the states bit for bit.
    vars(optimizer)[PLAIN_STATES] = {p: _to_host(state) for p, state in plain.items()}
    undo.add(optimizer.register_load_state_dict_post_hook(_forget_plain_states).remove)
    undo.add(optimizer.register_step_pre_hook(refuse_closure).remove)
    undo.add(optimizer.register_step_pre_hook(_forget_plain_states).remove)

    def restore() -> None:
        plain = vars(optimizer).pop(PLAIN_STATES, None)
        if plain is not None:
            states = {p: _from_host(state) for p, state in plain.items()}
        else:
            states = {}
            for group in optimizer.param_groups:
                fused = any({**defaults, **group}.get(key) for key in ("fused", "capturable"))
                for p in group["params"]:
                    if state := optimizer.state.get(p):
                        states[p] = with_notes(lift(p, state), state)
                        if fused and "step" in states[p]:
                            states[p]["step"] = states[p]["step"].to(p.device)
        undo()
        added = [set(defaults)] * (len(optimizer.param_groups) - len(groups))
        for group, before in zip(optimizer.param_groups, groups + added, strict=True):
            for key in [key for key in other.defaults if key not in before]:
                group.pop(key, None)
            for key, value in defaults.items():  # which a group that was added since has not
                group.setdefault(key, value)
        replace_states(optimizer, states)

    return Undo(restore)


def _load_in_4bit(optimizer: torch.optim.Optimizer, four: Adam4bit) -> Undo:
    """Convert loaded states to 4 bits, with rates as torchao wants them."""

    def receive(p: Tensor, state: State, group: dict[str, Any]) -> State:
        if "max_exp_avg_sq" in state or (state and "exp_avg" not in state):
            raise LowtideError("The saved state is not that of Adam or AdamW without amsgrad", where=", ".join(state))
        if type(state.get("exp_avg")) is Tensor:
            return with_notes(four.lowered(p, state), as_saved(p, state, group))
        return as_saved(p, state, group)

    def after(optimizer: torch.optim.Optimizer) -> None:
        four.rates_as_tensors(optimizer)

    undo = load_exactly(optimizer, receive)
    undo.add(optimizer.register_load_state_dict_post_hook(after).remove)
    return undo


@one_at_a_time
def _forget_plain_states(optimizer: torch.optim.Optimizer, *_: object) -> None:
    vars(optimizer).pop(PLAIN_STATES, None)


def _to_host(state: dict[str, Any]) -> dict[str, Any]:
    return {key: (value.device, value.cpu()) if isinstance(value, Tensor) else value for key, value in state.items()}


def _from_host(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value[1].to(value[0]) if isinstance(value, tuple) else value for key, value in state.items()}


def replace_states(optimizer: torch.optim.Optimizer, states: dict[Tensor, dict[str, Any]]) -> None:
    """Replace all states of the optimizer by these."""
    optimizer.state.clear()
    optimizer.state.update({p: state for p, state in states.items() if state})


def become(optimizer: Any, other: torch.optim.Optimizer) -> Undo:
    """Make an optimizer one of another class in place: its identity, groups, state and hooks stay, the rest is other's.

    A scheduler wraps the step that it finds on the object; that of the new class takes its place.
    """
    kind, before = type(optimizer), dict(vars(optimizer))
    shared = {key: value for key, value in before.items() if key in ("param_groups", "state") or "hooks" in key}
    marks = {key: value for key, value in before.items() if key.startswith(STEP_CALLED)}
    optimizer.__class__ = type(other)
    optimizer.__dict__.pop(AMP_SCALING, None)
    optimizer.__dict__.update({**vars(other), **shared, **marks})
    call_hooks_in_step(optimizer)
    optimizer.__dict__.update(shared)
    if "step" in before:
        optimizer.__dict__["step"] = _counted(optimizer, type(other).step)

    def restore() -> None:
        now = {key: vars(optimizer)[key] for key in (*shared, STEP_CALLED) if key in vars(optimizer)}
        optimizer.__class__ = kind
        optimizer.__dict__.clear()
        optimizer.__dict__.update({**before, **now})

    return Undo(restore)


def _counted(optimizer: Any, step: Callable[..., Any]) -> Callable[..., Any]:
    """The step as a learning-rate scheduler wraps it: it wants to know that a step came before its own."""

    @wraps(step)
    def counted(*args: Any, **kwargs: Any) -> Any:
        mark_step(optimizer)
        return step(optimizer, *args, **kwargs)

    mark_wrapped(counted)
    return counted
