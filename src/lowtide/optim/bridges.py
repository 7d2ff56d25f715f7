"""Optimizers of maintained libraries in the place of torch's: states in 4 bits by torchao, in 8 by bitsandbytes."""

from __future__ import annotations

import copy
import logging
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from lowtide.compat.optimizers import load_post_hooks, load_pre_hooks
from lowtide.errors import LowtideError, MissingExtra
from lowtide.optim.one_parameter import parameters_in
from lowtide.optim.rounding import with_notes
from lowtide.optim.state_dict import saved_parameters
from lowtide.undo import Undo


class Adam4bit:
    """Turns torch's Adam or AdamW into torchao's with 4-bit states.

    torchao compiles its step; for parameters on a CPU it runs as it is, since compiling there needs a C++ compiler. It
    wants the rate as a tensor, which schedulers fill.
    """

    def __init__(self, *, decoupled: bool) -> None:
        try:
            with _without_warnings():
                from torchao import optim
        except ImportError as error:
            raise MissingExtra("torchao", extra="optim") from error
        base: Any = optim.AdamW4bit if decoupled else optim.Adam4bit
        self.optimizer: Any = _runs_anywhere(base)([torch.empty(0)], lr=1e-3)

    def lowered(self, p: Tensor, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state of torch's AdamW for one parameter, in 4 bits."""
        converted: dict[str, Any] = {"step": torch.tensor(float(state["step"]))}
        for key, signed in (("exp_avg", True), ("exp_avg_sq", False)):
            buffer = self.optimizer._new_buffer(p, signed)
            if type(buffer) is Tensor:  # too small for 4 bits: it may be wider than the parameter
                buffer = buffer.to(state[key].dtype)
            converted[key] = buffer.copy_(state[key])
        return converted

    def raised(self, p: Tensor, state: dict[str, Any]) -> dict[str, Any]:
        """The state of torch's AdamW again."""
        converted: dict[str, Any] = {"step": state["step"].clone()}
        for key in ("exp_avg", "exp_avg_sq"):
            value = state[key]
            whole = value.dequantize() if hasattr(value, "dequantize") and type(value) is not Tensor else value
            converted[key] = torch.empty_like(p).copy_(whole)
        return converted

    def rates_as_tensors(self, optimizer: torch.optim.Optimizer) -> Undo:
        """Turn rates into tensors, as torchao wants them. The undo restores unchanged rates bit for bit."""
        before = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32)

        def restore() -> None:
            for group, rate in zip_longest(optimizer.param_groups, before):
                now = torch.as_tensor(group["lr"], dtype=torch.float32)
                untouched = rate is not None and torch.equal(now, torch.as_tensor(rate, dtype=torch.float32))
                group["lr"] = rate if untouched else float(group["lr"])

        return Undo(restore)


_SLOTS = ("state1", "state2")  # as bitsandbytes calls the states, each with a table of values and a scale for a block
_BLOCK, _LEAST = 256, 4096  # bitsandbytes' own: values to a scale, and values below which states stay in float32
_RULES = ("momentum", "lars", "lion", "lamb", "adam", "rmsprop", "adagrad")
_CANNOT = ("nesterov", "dampening", "maximize", "amsgrad", "differentiable")


def has_bridge(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether 8-bit states are bitsandbytes': for torch's SGD and for bitsandbytes' own optimizers."""
    return type(optimizer) is torch.optim.SGD or _is_bitsandbytes(optimizer)


class Bitsandbytes:
    """Has bitsandbytes step an optimizer, with the same numbers and the same rule.

    For torch's SGD with momentum, and bitsandbytes' own optimizers with 32-bit states. With a ``bound``, an update's
    norm is at most that share of the weight's: SGD is then LARS, and torch's Adam or AdamW LAMB. On 8-bit states,
    bitsandbytes' own step ignores a bound. Here a bounded step decodes one parameter's states and encodes them
    afterwards.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, bits: int = 8, bound: float | None = None) -> None:
        _refuse(optimizer)
        library = import_bitsandbytes()
        self.functional = library.functional
        self.keys = _SLOTS
        self.is_torchs = not _is_bitsandbytes(optimizer)
        if self.is_torchs:
            is_sgd = isinstance(optimizer, torch.optim.SGD)
            self.keys = ("momentum_buffer",) if is_sgd else ("exp_avg", "exp_avg_sq")
            states = library.optim.optimizer
            kind = bridged(states.Optimizer1State if is_sgd else states.Optimizer2State, self)
            rule = ("lars" if bound else "momentum") if is_sgd else ("lamb" if bound else "adam")
            self.optimizer: Any = kind(rule, [torch.empty(0)], optim_bits=bits, max_unorm=bound or 0.0)
            self.optimizer.defaults = dict(optimizer.defaults)  # groups get nothing that schedulers could mistake
        else:
            self.optimizer = copy.copy(optimizer)
            self.optimizer.__dict__ = dict(vars(optimizer))
            self.optimizer.__class__ = bridged(type(optimizer), self)
            self.optimizer.args = copy.copy(self.optimizer.args)
            self.optimizer.args.optim_bits = bits
            self.optimizer.name2qmap = {}
            self.optimizer.fill_qmap()
        self.bits = bits

    def lowered(self, p: Tensor, state: dict[str, Any]) -> dict[str, Any]:
        """Return a parameter's state as bitsandbytes keeps it; nothing before the first step."""
        if state.get(self.keys[0]) is None:
            return {}
        # torch's SGD counts no steps, and bitsandbytes' first one begins the average anew.
        converted: dict[str, Any] = {"step": int(state.get("step", 1))}
        for number, (slot, key) in enumerate(zip(_SLOTS, self.keys, strict=False), 1):
            if key not in state:
                continue
            values = state[key].to(p.device, torch.float32).contiguous()
            if self.bits == 8 and p.numel() >= _LEAST:
                table = self.optimizer.name2qmap["dynamic" if number == 1 else "udynamic"].to(p.device)
                converted[slot], converted[f"absmax{number}"] = self.encode(values, table)
                converted[f"qmap{number}"] = table
            else:
                converted[slot] = values.clone()
        if self.optimizer.args.max_unorm > 0:
            converted["unorm_vec"] = torch.zeros(1, device=p.device)
        return converted

    def raised(self, p: Tensor, state: dict[str, Any]) -> dict[str, Any]:
        """The state as the optimizer had it before."""
        converted: dict[str, Any] = {} if "momentum_buffer" in self.keys else {"step": state["step"]}
        for slot, key in zip(_SLOTS, self.keys, strict=False):
            if slot in state:
                values = self.decode(state, slot) if state[slot].dtype == torch.uint8 else state[slot].clone()
                converted[key] = values.to(p.dtype) if self.is_torchs else values
        if self.is_torchs and "step" in converted:
            converted["step"] = torch.tensor(float(converted["step"]))
        elif "unorm_vec" in state:
            converted["unorm_vec"] = state["unorm_vec"]
        return converted

    def encode(self, values: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        """Codes and the scales of their blocks."""
        codes, state = self.functional.quantize_blockwise(values, code=table, blocksize=_BLOCK)
        return codes, state.absmax

    def decode(self, state: dict[str, Any], slot: str) -> Tensor:
        """The values of a state in float32."""
        number = slot[-1]
        return self.functional.dequantize_blockwise(
            state[slot], absmax=state[f"absmax{number}"], code=state[f"qmap{number}"], blocksize=_BLOCK
        )


def bridged(base: Any, bridge: Bitsandbytes) -> Any:
    """A class of bitsandbytes that reads torch's groups, and keeps its bound with 8-bit states too."""

    def get_config(self: Any, gindex: int, pindex: int, group: dict[str, Any]) -> dict[str, Any]:
        _refuse_group(group)
        read = {"eps": 0.0, **group, "lr": float(group["lr"])}
        if "momentum" in group:
            read["betas"] = (group["momentum"], 0.0)
        return base.get_config(self, gindex, pindex, read)

    def init_state(self: Any, group: Any, p: Tensor, gindex: int, pindex: int) -> None:
        self.name2qmap = dict(self.name2qmap)  # a copy over fake tensors shares it, and writes to it
        base.init_state(self, group, p, gindex, pindex)

    def update_step(self: Any, group: Any, p: Tensor, gindex: int, pindex: int) -> None:
        state = self.state[p]
        coded = {slot: state[slot] for slot in _SLOTS if slot in state and state[slot].dtype == torch.uint8}
        if not coded or not self.args.max_unorm:
            base.update_step(self, group, p, gindex, pindex)
            return
        try:
            state.update({slot: bridge.decode(state, slot) for slot in coded})
            base.update_step(self, group, p, gindex, pindex)
            for slot, codes in coded.items():
                encoded, scales = bridge.encode(state[slot], state[f"qmap{slot[-1]}"])
                codes.copy_(encoded)
                state[f"absmax{slot[-1]}"].copy_(scales)
        finally:
            state.update(coded)

    def load_state_dict(self: Any, state_dict: dict[str, Any], move_to_device: bool = True) -> None:
        states, wrapped = dict(state_dict["state"]), base._FSDP_WRAPPED_QUANT_STATE_KEY
        for p, number, _ in saved_parameters(self, state_dict):
            state = dict(states.get(number, {}))
            state.update(state.pop(wrapped, {}))
            first = state.get(bridge.keys[0])
            is_plain = first is not None and first.dtype != torch.uint8
            if state:
                states[number] = with_notes(bridge.lowered(p, state), state) if is_plain else state
        loaded = {**state_dict, "state": states}
        for hook in load_pre_hooks(self).values():  # which bitsandbytes leaves out
            loaded = hook(self, loaded) or loaded
        base.load_state_dict(self, loaded, move_to_device)
        for hook in load_post_hooks(self).values():
            hook(self)

    methods = {
        "step": _step,
        "get_config": get_config,
        "init_state": init_state,
        "update_step": torch.no_grad()(update_step),
        "load_state_dict": load_state_dict,
    }
    return type(base.__name__, (base,), {**methods, "__doc__": base.__doc__})


@torch.no_grad()
def _step(self: Any, closure: None = None) -> None:
    """One step; bitsandbytes' own waits for the device after each parameter, for the sake of paged states."""
    for gindex, group in enumerate(self.param_groups):
        for pindex, p in enumerate(group["params"]):
            if p.grad is not None:
                if not self.state[p]:
                    self.init_state(group, p, gindex, pindex)
                self.update_step(group, p, gindex, pindex)


@contextmanager
def _without_warnings() -> Generator[None]:
    """Silence the libraries' logs about kernels that are not for this machine."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        yield
    finally:
        logging.disable(before)


def import_bitsandbytes() -> Any:
    """The library, or what to install."""
    try:
        with _without_warnings():
            import bitsandbytes
    except ImportError as error:
        raise MissingExtra("bitsandbytes", extra="optim") from error
    return bitsandbytes


def _is_bitsandbytes(optimizer: object) -> bool:
    return any(base.__module__.startswith("bitsandbytes.") for base in type(optimizer).__mro__)


def _refuse(optimizer: Any) -> None:
    """Refuse an optimizer that bitsandbytes would step by another rule, or not at all."""
    theirs = _is_bitsandbytes(optimizer)
    if theirs and (optimizer.optimizer_name not in _RULES or optimizer.args.optim_bits != 32 or optimizer.is_paged):
        raise LowtideError(
            f"{type(optimizer).__name__} has no 32-bit states that could be in 8 bits",
            hint=f"There are bridges for bitsandbytes' {', '.join(_RULES)}.",
        )
    for group in optimizer.param_groups:
        _refuse_group(group)
    for p in parameters_in(optimizer):
        if not p.is_contiguous() or p.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise LowtideError(
                f"bitsandbytes steps contiguous parameters of 16 or 32 bits, and one is {p.dtype} with strides "
                f"{tuple(p.stride())}",
                hint='The state can be on the host instead: "cpu".',
            )


def _refuse_group(group: dict[str, Any]) -> None:
    cannot = [name for name in _CANNOT if group.get(name)]
    if "decoupled_weight_decay" in group and group["weight_decay"] and not group["decoupled_weight_decay"]:
        cannot.append("weight decay in the gradient")
    if "momentum" in group and not group["momentum"]:
        raise LowtideError("SGD without momentum has no state", hint="There is nothing to lower.")
    if cannot:
        raise LowtideError(f"bitsandbytes has no {cannot[0]}", hint='The state can be on the host instead: "cpu".')


def _runs_anywhere(base: type) -> type:
    """The class of torchao, uncompiled on a CPU."""

    def step(self: Any, closure: Any = None) -> Any:
        compiles = all(p.is_cuda for p in parameters_in(self))
        with nullcontext() if compiles else torch.compiler.set_stance("force_eager"):
            return base.step(self, closure)

    return type(base.__name__, (base,), {"step": step, "__doc__": base.__doc__})
